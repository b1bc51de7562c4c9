"""How high a proposal climbs, and what it would be worth: each rung in a walled-in process, the first failure ends it.

    judge = Judge(OPS["geglu"], ("gfx1100", "gfx942"))
    judged = judge(proposal)                  # rungs with their findings, modelled times, and the verdict
    judged.finding                            # what goes back to the proposer

A verdict is `offered` where every rung was passed and the work that was counted, as a modelled time, is less than what
the shipped kernel needs; on a card the measured time decides in its place. What a process answers is read strictly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rocm_sd import arch as archs
from rocm_sd import typed_json
from rocm_sd.agents.confinement import LIMITS, Ended, confined
from rocm_sd.agents.proposals import Proposal, module_of, why_not_allowed
from rocm_sd.agents.trying import KERNELS, SOURCE
from rocm_sd.errors import RocmSdError
from rocm_sd.tuning.ranking import model
from rocm_sd.tuning.static.tasks import CompiledLaunch
from rocm_sd.typed_json import Misfit
from rocm_sd.verify.programs import CountedLaunch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rocm_sd.agents.confinement import Limits
    from rocm_sd.ops.registry import Op

__all__ = ["OFFERED", "REFUSED", "SLOWER", "Judge", "Judged", "Rung", "Timing"]

OFFERED, SLOWER, REFUSED = "offered", "no better", "refused"
# Less than that is within what the model leaves out.
_LEAST_GAIN = 0.01
_TRYING = "rocm_sd.agents.trying"
# To interpret a million values of a product takes a minute of a core, and more by the clock where others use it.
_LIMITS = replace(LIMITS, seconds=900.0, cpu_seconds=300)
_MOST_SAID = 1500
_Times = dict[str, dict[str, float]]


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
    """Measured on a card, in turns with the kernel that is shipped: how many times as fast, with its interval."""

    device: str
    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Judged:
    """`modelled`: microseconds by architecture and call; `ratio`: their share of the shipped kernel's."""

    verdict: str
    rungs: tuple[Rung, ...]
    modelled: dict[str, dict[str, float]] = field(default_factory=dict)
    ratio: dict[str, float] = field(default_factory=dict)
    config: dict[str, int] = field(default_factory=dict)
    measured: tuple[Timing, ...] = ()

    @property
    def height(self) -> int:
        """The highest rung that was passed on all that it was tried on."""
        failed = {each.rung for each in self.rungs if each.state == "failed"}
        passed = {each.rung for each in self.rungs if each.state != "failed"} - failed
        return max((rung for rung in passed if not failed or rung < min(failed)), default=0)

    @property
    def finding(self) -> str:
        """One paragraph for who proposed it."""
        failed = next((each for each in self.rungs if each.state == "failed"), None)
        if failed is not None:
            where = "" if failed.rung == 1 else f" ({failed.arch})"
            return f"It failed at rung {failed.rung}, {_RUNGS[failed.rung]}{where}: {failed.finding}"
        times = "; ".join(f"{arch}: {value:.3f} of the shipped kernel's time" for arch, value in self.ratio.items())
        figures = "; ".join(
            f"{each.arch}: {each.figures['vgprs']} VGPRs, {each.figures['lds']} bytes of LDS, "
            f"{each.figures['waves_per_simd']} waves a SIMD"
            for each in self.rungs
            if each.rung == 3 and "vgprs" in each.figures
        )
        return f"It passed every rung. Modelled: {times}. Machine code: {figures}."

    @property
    def score(self) -> float:
        """The geometric mean over architectures; infinity for what failed."""
        if self.verdict == REFUSED or not self.ratio:
            return math.inf
        return math.exp(sum(math.log(value) for value in self.ratio.values()) / len(self.ratio))


_RUNGS = {
    1: "what a proposal may contain",
    2: "results in the interpreter",
    3: "gates on machine code",
    4: "execution of the machine code",
    5: "results on the card",
}


@dataclass(frozen=True)
class _Interpreted:
    rungs: tuple[Rung, ...]
    counted: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class _Compiled:
    rungs: tuple[Rung, ...]
    compiled: dict[str, dict[str, Any]]
    counted: dict[str, dict[str, Any]]


class Judge:
    """Of proposals for one op. `note` hears which rung is being climbed; `limits` are those of each process."""

    def __init__(
        self,
        op: Op,
        architectures: Sequence[str],
        note: Callable[[str], object] = lambda _what: None,
        limits: Limits = _LIMITS,
    ) -> None:
        self.op, self.architectures, self._note, self._limits = op, tuple(architectures), note, limits
        self._shipped: dict[str, _Times] = {}

    def __call__(self, proposal: Proposal) -> Judged:
        reason = why_not_allowed(self.op, proposal)
        if reason is not None:
            return Judged(REFUSED, (Rung(1, "any", "failed", reason[:_MOST_SAID]),))
        allowed = Rung(1, "any", "passed", "it contains nothing but what is allowed")
        if proposal.kind == "space":
            return self._best_of(proposal, allowed)
        return self._climbed(proposal, (allowed,))

    def shipped(self, kind: str = "kernel", bucket: str = "", source: str = "") -> _Times:
        """Modelled microseconds of what is shipped, by architecture and call."""
        key = f"{kind == 'hip'} {bucket}"
        if key not in self._shipped:
            self._note("the shipped kernel")
            self._shipped[key] = self.shipped_as(
                Proposal("hip" if kind == "hip" else "kernel", bucket=bucket, source=source)
            )
        return self._shipped[key]

    def shipped_as(self, asked: Proposal) -> _Times:
        """The same of the shipped kernel with another config, or of one bucket."""
        interpreted, compiled = self._figures(asked, {})
        return _modelled(compiled.compiled, interpreted.counted)

    def _best_of(self, proposal: Proposal, allowed: Rung) -> Judged:
        """Of all configs the one whose work is least climbs; the others are told by their modelled times."""
        times: list[tuple[float, dict[str, int]]] = []
        faults: list[str] = []
        for config in proposal.configs():
            each = replace(proposal, kind="config", config=config, space={})
            self._note(f"{config}")
            try:
                interpreted, compiled = self._figures(each, {})
                ratio = self._ratio(each, _modelled(compiled.compiled, interpreted.counted))
            except (Ended, Misfit) as error:
                faults.append(f"{config}: {error}")
                continue
            if ratio:
                times.append((math.prod(ratio.values()), config))
        if not times:
            said = "; ".join(faults)[:_MOST_SAID]
            return Judged(REFUSED, (allowed, Rung(3, "any", "failed", f"no config could be compiled: {said}")))
        _, best = min(times, key=lambda each: (each[0], tuple(each[1].values())))
        return self._climbed(replace(proposal, kind="config", config=best, space={}), (allowed,))

    def _climbed(self, proposal: Proposal, rungs: tuple[Rung, ...]) -> Judged:
        files = self._files(proposal)
        try:
            counted: Mapping[str, Mapping[str, Any]] = {}
            if proposal.kind != "hip":
                self._note("rung 2, interpreted")
                interpreted = self._interpreted(proposal, files, climb=True)
                rungs, counted = rungs + interpreted.rungs, interpreted.counted
            if not _has_failed(rungs):
                self._note("rungs 3 and 4, compiled and emulated")
                compiled = self._compiled(proposal, files, climb=True)
                rungs, counted = rungs + compiled.rungs, counted or compiled.counted
        except (Ended, Misfit) as error:
            at = 2 if proposal.kind != "hip" and len(rungs) == 1 else 3
            ended = Rung(at, "any", "failed", str(error)[:_MOST_SAID])
            return Judged(REFUSED, (*rungs, ended), config=proposal.config)
        if _has_failed(rungs):
            return Judged(REFUSED, rungs, config=proposal.config)
        modelled = _modelled(compiled.compiled, counted)
        ratio = self._ratio(proposal, modelled)
        better = bool(ratio) and max(ratio.values()) <= 1.0 and min(ratio.values()) <= 1.0 - _LEAST_GAIN
        return Judged(OFFERED if better else SLOWER, rungs, modelled, ratio, proposal.config)

    def _ratio(self, proposal: Proposal, modelled: _Times) -> dict[str, float]:
        shipped = self.shipped(proposal.kind, proposal.bucket, proposal.source)
        return {
            arch: round(math.prod(us / shipped[arch][call] for call, us in calls.items()) ** (1 / len(calls)), 4)
            for arch, calls in modelled.items()
            if calls
        }

    def _files(self, proposal: Proposal) -> dict[str, str]:
        if proposal.kind == "hip":
            return {SOURCE: proposal.text}
        return {KERNELS: module_of(self.op, proposal)} if proposal.kind == "kernel" else {}

    def _figures(self, proposal: Proposal, files: Mapping[str, str]) -> tuple[_Interpreted, _Compiled]:
        """What the model needs, and no rung."""
        compiled = self._compiled(proposal, files, climb=False)
        if proposal.kind == "hip":
            return _Interpreted((), compiled.counted), compiled
        return self._interpreted(proposal, files, climb=False), compiled

    def _interpreted(self, proposal: Proposal, files: Mapping[str, str], *, climb: bool) -> _Interpreted:
        answer = confined(
            f"{_TRYING}:interpret",
            self._job(proposal, climb=climb),
            files=files,
            environment={"TRITON_INTERPRET": "1"},
            limits=self._limits,
        )
        return typed_json.read(_Interpreted, answer, top="the process's answer")

    def _compiled(self, proposal: Proposal, files: Mapping[str, str], *, climb: bool) -> _Compiled:
        job = self._job(proposal, climb=climb)
        answer = confined(f"{_TRYING}:compile_and_execute", job, files=files, limits=self._limits)
        return typed_json.read(_Compiled, answer, top="the process's answer")

    def _job(self, proposal: Proposal, *, climb: bool) -> dict[str, Any]:
        return {
            "op": self.op.name,
            "source": proposal.source,
            "bucket": proposal.bucket,
            "config": proposal.config,
            "architectures": list(self.architectures),
            "climb": climb,
        }


def _has_failed(rungs: Sequence[Rung]) -> bool:
    return any(each.state == "failed" for each in rungs)


def _modelled(compiled: Mapping[str, Mapping[str, Any]], counted: Mapping[str, Mapping[str, Any]]) -> _Times:
    """A call's launches one after the other; a gate's blemishes have ended the climb before."""
    found: _Times = {}
    for arch, calls in compiled.items():
        found[arch] = {}
        for call, launches in calls.items():
            made = [typed_json.read(CompiledLaunch, each) for each in launches]
            programs = [typed_json.read(CountedLaunch, each) for each in counted[arch][call]]
            if [(each.kernel, each.grid) for each in made] != [(each.kernel, each.grid) for each in programs]:
                raise RocmSdError(f"Other kernels or grids were counted than were compiled, for {call} on {arch}.")
            seconds = [
                model(archs.get(arch), math.prod(one.grid), one.code, other.program).seconds
                for one, other in zip(made, programs, strict=True)
            ]
            found[arch][call] = round(sum(seconds) * 1e6, 3)
    return found
