"""Search strategies: in which order candidates are timed, how often, and which ones go on.

Successive halving is built in: all are timed a few times, the better third of them more often, and so on. Other
packages add strategies by an entry point that names one, or a function that returns one:

    [project.entry-points."rocm_sd.search_strategies"]
    my-strategy = "my_package.search:Strategy"
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from rocm_sd import plugging
from rocm_sd.errors import require_one_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rocm_sd.tuning.search.candidates import Candidate

__all__ = ["ENTRY_POINTS", "Halving", "Measure", "Strategy", "strategies", "strategy"]

ENTRY_POINTS = "rocm_sd.search_strategies"


class Measure(Protocol):
    """What a strategy asks for."""

    def __call__(self, candidate: Candidate, turns: int) -> float | None:
        """Its time over stock's (less is better), from so many turns; None where it failed or time is over."""

    def left(self) -> float:
        """The share of this problem's time that is left: 1 at the start, 0 or less when it is over."""


@runtime_checkable
class Strategy(Protocol):
    @property
    def name(self) -> str: ...

    def search(self, candidates: Sequence[Candidate], measure: Measure) -> None:
        """Measure as it sees fit; what was measured is stored as it comes. Stock is not among the candidates."""


@dataclass(frozen=True)
class Halving:
    """`first` turns for all, then `growth` times as many for the best `1 / growth`, until there were `last` turns.

    The first round may take `share` of the time, so that what looks best is always timed well. Where it ends early,
    those that it did not reach were the last in order: candidates come with the likely ones first.
    """

    name: str = "halving"
    first: int = 4
    growth: int = 3
    last: int = 36
    share: float = 0.6

    def search(self, candidates: Sequence[Candidate], measure: Measure) -> None:
        scores: dict[Candidate, float] = {}
        for candidate in candidates:
            if measure.left() <= 1 - self.share and scores:
                break
            score = measure(candidate, self.first)
            if score is not None:
                scores[candidate] = score
        turns = self.first
        going_on = sorted(scores, key=scores.__getitem__)
        while turns < self.last and going_on:
            turns = min(self.last, turns * self.growth)
            going_on = going_on[: max(1, math.ceil(len(going_on) / self.growth))]
            for candidate in going_on:
                if measure.left() <= 0:
                    return
                score = measure(candidate, turns)
                # One that failed at last is out; the next best of the round before has not earned its place.
                scores[candidate] = math.inf if score is None else score
            going_on = sorted((c for c in going_on if scores[c] < math.inf), key=scores.__getitem__)


def strategies() -> dict[str, Strategy]:
    """All that are built in or installed, by name. One that cannot be loaded is named in a warning and skipped."""
    return plugging.by_name(ENTRY_POINTS, Strategy, "strategy", (Halving(),))  # type: ignore[type-abstract]


def strategy(name: str) -> Strategy:
    known = strategies()
    require_one_of("strategy", name, known)
    return known[name]
