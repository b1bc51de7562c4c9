"""What every part of the engine gives back once it has changed a pipeline: what to note, and how to take it back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Installed"]


@dataclass(frozen=True)
class Installed:
    """`notes` is asked anew for every report: a graph that was captured, or a reason to fall back, comes with use."""

    notes: Callable[[], Sequence[str]]
    restore: Callable[[], None]
