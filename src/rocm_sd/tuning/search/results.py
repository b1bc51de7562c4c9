"""What a search found for one problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.tuning.search.candidates import Candidate

__all__ = ["Failure", "TuningResult"]


@dataclass(frozen=True)
class Failure:
    """A candidate by name, and what was wrong with it: a wrong result, an error, a crash or a hang."""

    candidate: str
    reason: str


@dataclass(frozen=True)
class TuningResult:
    """`measured` of `candidates` are known, `now` of them since this run; `unchecked`: why none could be checked."""

    op: str
    problem: Mapping[str, int | str]
    count: int
    chosen: Candidate
    us: float | None
    stock_us: float | None
    candidates: int
    measured: int
    now: int
    complete: bool
    failures: tuple[Failure, ...]
    unchecked: str = ""

    @property
    def times_stock(self) -> float | None:
        return None if not self.us or not self.stock_us else self.stock_us / self.us

    def to_dict(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "problem": dict(self.problem),
            "count": self.count,
            "chosen": {"implementation": self.chosen.implementation, "config": self.chosen.config.to_dict()},
            "us": self.us,
            "stock_us": self.stock_us,
            "times_stock": self.times_stock,
            "candidates": self.candidates,
            "measured": self.measured,
            "measured_now": self.now,
            "complete": self.complete,
            "failures": [{"candidate": f.candidate, "reason": f.reason} for f in self.failures],
            "unchecked": self.unchecked or None,
        }
