"""The verdict on an approximation: how far its pictures are from the exact ones, and within which budget that is.

An exact engine is held to float64 (gate.py). A lossy one differs from that by intent, so that its speed is never given
without its `Quality`: what it leaves out, and the scores of its pictures.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING

from rocm_sd.errors import InvalidOption
from rocm_sd.quality.budget import BUDGETS, Scores, parse_budget

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rocm_sd.quality.budget import Budget

__all__ = ["EQUAL_DB", "EXACT", "GIVEN", "LEAST_PROMPTS", "LOSSY_ENGINES", "OUTSIDE", "Quality", "measured", "problems"]

# The engines of this project that approximate, and the budget that each one claims.
LOSSY_ENGINES = {"rocm-sd-high": "high", "rocm-sd-balanced": "balanced"}
# A setting that somebody gives claims no budget.
GIVEN = "given"
# Equal pictures have no finite PSNR, and JSON no other.
EQUAL_DB = 999.0
OUTSIDE = "outside of both"
# One picture says nothing of the next.
LEAST_PROMPTS = 2


@dataclass(frozen=True)
class Quality:
    """`name`: "exact", the budget that is claimed ("high", "psnr=32"), or "given". `setting`: what is left out.

    `psnr_db` and `ssim`: of each prompt's picture against the exact one of the same seed. `match`: the share that shows
    what its prompt says less that of the exact ones, and its interval; empty where nothing can tell.
    """

    name: str = "exact"
    setting: str = ""
    psnr_db: tuple[float, ...] = ()
    ssim: tuple[float, ...] = ()
    match: tuple[float, ...] = ()

    @property
    def is_lossy(self) -> bool:
        return self.name != "exact"

    @property
    def is_scored(self) -> bool:
        return len(self.psnr_db) >= LEAST_PROMPTS and len(self.psnr_db) == len(self.ssim)

    @property
    def prompts(self) -> int:
        return len(self.psnr_db)

    @property
    def median_psnr(self) -> float:
        return median(self.psnr_db)

    @property
    def mean_ssim(self) -> float:
        return fmean(self.ssim)

    @property
    def psnr_words(self) -> str:
        return "equal" if self.median_psnr >= EQUAL_DB else f"{self.median_psnr:.1f}"

    @property
    def match_words(self) -> str:
        """In points, with the interval; empty where nothing can tell."""
        if len(self.match) != 3:
            return ""
        value, low, high = (100 * each for each in self.match)
        return f"{value:+.1f} ({low:+.1f} to {high:+.1f})"

    def within(self, budget: Budget) -> bool:
        from rocm_sd.quality.prompt_match import Interval  # noqa: PLC0415 -- needs torch, which records do not

        match = Interval(*self.match) if len(self.match) == 3 else None
        return self.is_scored and budget.holds(Scores(self.psnr_db, self.ssim, match))

    @property
    def verdict(self) -> str:
        """Of the budgets with a name the strictest that it is within."""
        if not self.is_lossy:
            return "exact"
        if not self.is_scored:
            return "not measured"
        return next((f"within {name}" for name, budget in BUDGETS.items() if self.within(budget)), OUTSIDE)

    def __str__(self) -> str:
        if not self.is_lossy or not self.is_scored:
            return self.verdict
        near = "equal" if self.psnr_words == "equal" else f"{self.psnr_words} dB"
        match = f", prompt match {self.match_words} points" if self.match_words else ""
        return f"{self.verdict}: PSNR {near}, SSIM {self.mean_ssim:.3f}{match}, {self.prompts} prompts"


EXACT = Quality()


def measured(name: str, setting: str, scores: Scores) -> Quality:
    match = () if scores.match is None else (scores.match.value, scores.match.low, scores.match.high)
    return Quality(name, setting, tuple(min(each, EQUAL_DB) for each in scores.psnr), tuple(scores.ssim), match)


def problems(engine: str, quality: Quality, *, claims: bool = True) -> Iterator[str]:
    """Why a speed with this quality cannot be published, in words that follow the engine's name. Without `claims`: why
    it cannot even be shown, which it can where pictures are outside of the budget that they claim, and it says so.
    """
    if not quality.is_lossy:
        if engine in LOSSY_ENGINES:
            yield "is an approximation, and does not say how far its pictures are from the exact ones"
        return
    if not quality.is_scored:
        yield f"approximates (quality {quality.name}), and its pictures were not compared with the exact ones"
        return
    if len(quality.match) not in {0, 3}:
        yield "has a prompt match that is not a share and its interval"
    claimed = LOSSY_ENGINES.get(engine, quality.name)
    if claimed != quality.name:
        yield f"claims the quality {quality.name}, and is {claimed}"
    if claimed == GIVEN or not claims:
        return
    try:
        _, budget = parse_budget(claimed)
    except InvalidOption:
        yield f"claims the quality {claimed!r}, which is none"
        return
    if not quality.within(budget):
        yield f"claims the quality {claimed}, at least {budget}, and is {quality}"
