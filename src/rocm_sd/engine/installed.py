"""What every part of the engine gives back once it has changed a pipeline: what to note, and how to take it back.

Notes are sentences for the table of a report. What its verdict is made of comes as facts: graphs and approximations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["MEASURED", "SHIPPED", "WAITS", "Approximated", "Graphs", "Installed", "ModelPlan"]

# Where the plan of a model comes from.
MEASURED, SHIPPED, WAITS = "measured here", "shipped", "waits for its first picture"


@dataclass(frozen=True)
class ModelPlan:
    """By what one model runs. `times` stock's speed, and `when` that was measured: None where stock was the fastest.
    `why`: the reason that nothing could be measured, if there is one.
    """

    model: str
    source: str
    times: float | None = None
    when: str = ""
    why: str = ""


@dataclass(frozen=True)
class Graphs:
    """Of one model's calls: how many graphs there are, how often they were replayed, and why a call had none."""

    model: str
    count: int = 0
    replays: int = 0
    why_none: tuple[str, ...] = ()


@dataclass(frozen=True)
class Approximated:
    """`what` is left out, in a few words. `cost`: how far pictures are from exact ones, where that was measured.

    `why_exact`: why everything so far was computed exactly nonetheless; None where it was not.
    """

    what: str
    cost: str = ""
    why_exact: str | None = None


@dataclass(frozen=True)
class Installed:
    """`notes` is asked anew for every report: a graph that was captured, or a reason to fall back, comes with use."""

    notes: Callable[[], Sequence[str]]
    restore: Callable[[], None]
    graphs: Callable[[], Sequence[Graphs]] = tuple
    approximated: Callable[[], Sequence[Approximated]] = tuple
