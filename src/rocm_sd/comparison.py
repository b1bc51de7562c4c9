"""What a comparison of two engines' timings says. It needs no torch, so that records are read without it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TURNS_FOR_95", "Comparison"]

# From so many turns on `low` and `high` are a 95% interval; measuring.py has the reason.
TURNS_FOR_95 = 8


@dataclass(frozen=True)
class Comparison:
    """How many times as fast `engine` is as `against`, turn by turn of one interleaved run.

    `low` and `high` are a 95% interval, or of fewer than eight turns the extremes that they allow. `verdict`: "faster",
    "slower" or "no difference", which is all that can be said while the interval contains 1.
    """

    engine: str
    against: str
    batch: int
    ratio: float
    low: float
    high: float
    verdict: str
