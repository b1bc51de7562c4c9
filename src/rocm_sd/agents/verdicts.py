"""What was found of a proposal: its rungs, its modelled and measured times, and the verdict on it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from rocm_sd.measuring import compare

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rocm_sd.typed_json import Rules

__all__ = [
    "ENDED", "LEAST_GAIN", "OFFERED", "REFUSED", "RULES", "SLOWER", "Judged", "Rung", "Timing", "has_failed",
    "timing_of",
]  # fmt: skip

OFFERED, SLOWER, REFUSED = "offered", "no better", "refused"
# Of the modelled time: less than that is within what the model leaves out.
LEAST_GAIN = 0.01
# In the figures of a rung that was not climbed, nor any after it, since there was nothing to win.
ENDED = "ended"
_FASTER, _SLOWER, _EVEN = "faster", "slower", "no difference"
# Of whoever wrote down a rung or a verdict: a process, or the file of a stranger.
RULES: Rules = {
    "Rung.rung": {"minimum": 1, "maximum": 5},
    "Rung.state": {"enum": ["passed", "failed", "skipped"]},
    "Judged.verdict": {"enum": [OFFERED, SLOWER, REFUSED]},
    "Timing.verdict": {"enum": [_FASTER, _SLOWER, _EVEN]},
}
_RUNGS = {
    1: "what a proposal may contain",
    2: "results in the interpreter",
    3: "gates on machine code",
    4: "execution of the machine code",
    5: "results on the card",
}


@dataclass(frozen=True)
class Rung:
    """`arch` names what it was shown on: an architecture, or the machine itself."""

    rung: int
    arch: str
    state: str
    finding: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Timing:
    """One call on a card, in turns with the kernel that is shipped and with stock torch, medians in microseconds.

    `ratio`: how many times as fast as the shipped one it is, from `low` to `high` by the interval over whole turns.
    """

    device: str
    ratio: float
    low: float
    high: float
    arch: str
    call: str
    turns: int
    us: float
    shipped_us: float
    stock_us: float
    verdict: str

    @property
    def is_faster(self) -> bool:
        return self.verdict == _FASTER

    @property
    def is_slower(self) -> bool:
        return self.verdict == _SLOWER


def timing_of(
    device: str, arch: str, call: str, ours: Sequence[float], shipped: Sequence[float], stock: Sequence[float]
) -> Timing:
    """From milliseconds, turn by turn."""
    found = compare("ours", "shipped", 1, ours, shipped)
    ratio, low, high = (round(value, 4) for value in (found.ratio, found.low, found.high))
    us, shipped_us, stock_us = (round(1e3 * median(each), 3) for each in (ours, shipped, stock))
    return Timing(device, ratio, low, high, arch, call, len(ours), us, shipped_us, stock_us, found.verdict)


@dataclass(frozen=True)
class Judged:
    """`modelled`: microseconds by architecture and call; `ratio`: their share of the shipped kernel's.

    `worse`: of one that is no better, which counted work is more than the shipped kernel's, in words.
    """

    verdict: str
    rungs: tuple[Rung, ...]
    modelled: dict[str, dict[str, float]] = field(default_factory=dict)
    ratio: dict[str, float] = field(default_factory=dict)
    config: dict[str, int] = field(default_factory=dict)
    measured: tuple[Timing, ...] = ()
    worse: tuple[str, ...] = ()

    @property
    def height(self) -> int:
        """The highest rung that was passed on all that it was tried on."""
        failed = {each.rung for each in self.rungs if each.state == "failed"}
        passed = {each.rung for each in self.rungs if each.state != "failed"} - failed
        return max((rung for rung in passed if not failed or rung < min(failed)), default=0)

    @property
    def shares(self) -> dict[str, float]:
        """Of the shipped kernel's time, by architecture: measured where there is a card of it, else modelled."""
        return {**self.ratio, **self.measured_shares}

    @property
    def measured_shares(self) -> dict[str, float]:
        """The geometric mean over the calls that were timed."""
        names = dict.fromkeys(each.arch for each in self.measured)
        return {
            name: round(_mean([1.0 / each.ratio for each in self.measured if each.arch == name]), 4) for name in names
        }

    @property
    def finding(self) -> str:
        """One paragraph for who proposed it."""
        failed = next((each for each in self.rungs if each.state == "failed"), None)
        if failed is not None:
            where = "" if failed.rung == 1 else f" ({failed.arch})"
            return f"It failed at rung {failed.rung}, {_RUNGS[failed.rung]}{where}: {failed.finding}"
        return " ".join(self._passed())

    def _passed(self) -> Iterator[str]:
        left = [f"{each.rung} ({each.arch}), {each.finding}" for each in self.rungs if each.state == "skipped"]
        ended = next((each.finding for each in self.rungs if each.state == "skipped" and each.figures.get(ENDED)), "")
        if ended:
            yield f"It climbed no further: {ended}."
        else:
            yield f"It passed every rung but: {'; '.join(left)}." if left else "It passed every rung."
        if self.measured:
            told = "; ".join(
                f"{each.call}: {each.us:g} us, {each.ratio:.3f} ({each.low:.3f} to {each.high:.3f}) times as fast as "
                f"the shipped kernel, {each.verdict}"
                for each in self.measured
            )
            yield f"Measured on {self.measured[0].device}: {told}."
        if self.ratio:
            times = "; ".join(f"{arch}: {value:.3f} of the shipped kernel's time" for arch, value in self.ratio.items())
            yield f"Modelled: {times}."
        figures = "; ".join(
            f"{each.arch}: {each.figures['vgprs']} VGPRs, {each.figures['lds']} bytes of LDS, "
            f"{each.figures['waves_per_simd']} waves a SIMD"
            for each in self.rungs
            if each.rung == 3 and {"vgprs", "lds", "waves_per_simd"} <= set(each.figures)
        )
        if figures:
            yield f"Machine code: {figures}."
        if self.worse:
            yield f"Worse than the shipped kernel: {'; '.join(self.worse)}."

    @property
    def score(self) -> float:
        """The geometric mean of its shares over architectures; infinity for what failed."""
        shares = list(self.shares.values())
        if self.verdict == REFUSED or not shares or min(shares) <= 0.0:
            return math.inf
        return _mean(shares)

    @property
    def is_better(self) -> bool:
        """Nowhere slower than what is shipped, and faster somewhere: beyond doubt on a card, by more than the model's
        own gaps elsewhere.
        """
        timed = {each.arch for each in self.measured}
        modelled = [value for arch, value in self.ratio.items() if arch not in timed]
        if any(each.is_slower for each in self.measured) or any(value > 1.0 for value in modelled):
            return False
        return any(each.is_faster for each in self.measured) or any(value <= 1.0 - LEAST_GAIN for value in modelled)


def has_failed(rungs: Sequence[Rung]) -> bool:
    return any(each.state == "failed" for each in rungs)


def _mean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))
