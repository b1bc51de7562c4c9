"""How far approximated pictures may be from the exact ones, and whether they are."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rocm_sd.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rocm_sd.quality.prompt_match import Interval

__all__ = ["BUDGETS", "Budget", "Scores", "parse_budget"]


@dataclass(frozen=True)
class Scores:
    """Of pictures against the exact ones of the same prompts: PSNR in dB and SSIM of each pair. `match`: the share that
    shows what its prompt says less that of the exact ones; None where nothing can tell.
    """

    psnr: Sequence[float]
    ssim: Sequence[float]
    match: Interval | None = None

    @property
    def median_psnr(self) -> float:
        return statistics.median(self.psnr)

    @property
    def mean_ssim(self) -> float:
        return statistics.fmean(self.ssim)

    def __str__(self) -> str:
        near = "equal" if math.isinf(self.median_psnr) else f"median PSNR {self.median_psnr:.1f} dB"
        said = f"{near}, SSIM {self.mean_ssim:.3f}"
        if self.match is None:
            return f"{said}, prompt match not measured"
        points = [100 * value for value in (self.match.value, self.match.low, self.match.high)]
        return f"{said}, prompt match {points[0]:+.1f} points ({points[1]:+.1f} to {points[2]:+.1f})"


@dataclass(frozen=True)
class Budget:
    """The least median PSNR in dB and mean SSIM, and the largest drop of prompt match in points."""

    psnr: float = 0.0
    ssim: float = 0.0
    match: float = 100.0

    def holds(self, scores: Scores) -> bool:
        # Written so that NaN, which compares false, is outside.
        near = scores.median_psnr >= self.psnr and scores.mean_ssim >= self.ssim
        return near and (scores.match is None or scores.match.value * 100 >= -self.match)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"PSNR {self.psnr:g} dB, SSIM {self.ssim:g}, prompt match -{self.match:g} points"


BUDGETS = {"high": Budget(30.0, 0.95, 1.0), "balanced": Budget(24.0, 0.85, 3.0)}


def parse_budget(text: str) -> tuple[str, Budget]:
    """Its name and what it is: `high`, or `psnr=32,ssim=0.97,match=0.5`, whose name is its text."""
    if text in BUDGETS:
        return text, BUDGETS[text]
    given: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if name not in ("psnr", "ssim", "match") or not (math.isfinite(number) and number >= 0):
            raise InvalidOption("within", text, [*BUDGETS, "psnr=32,ssim=0.97,match=0.5"])
        given[name] = number
    return text, Budget(**given)
