"""What is kept of the steps of a picture, for those that leave something out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

if TYPE_CHECKING:
    from rocm_sd.engine.approximation.skipping import Skipping
    from rocm_sd.engine.schedule import ScheduleRun

__all__ = ["Kept", "Pictures"]

# Flux's pipelines call it twice a step where they are given a negative prompt.
_MOST_PROMPTS = 2


@dataclass
class Kept:
    """Of one picture, or one batch of them. `features`: of the last whole step and of the one before, with their step
    numbers; `added`: what the first blocks of a transformer had added in the last whole step; `difference`: the half
    with the prompt less the other half.
    """

    run: ref[ScheduleRun]
    text: ref[torch.Tensor]
    skipping: Skipping
    first: int
    last: int
    form: tuple[Any, ...]
    features: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    added: torch.Tensor | None = None
    difference: torch.Tensor | None = None

    def keep(self, number: int, features: torch.Tensor, rows: slice, added: torch.Tensor | None = None) -> None:
        """Of a whole step that has computed these rows of the batch."""
        if rows.start is not None:
            # Of the half that was not computed, what there was before. Where a picture begins without guidance there is
            # nothing, and nothing that will read it: the other half is as good there as any.
            others = self.features[-1][1][: rows.start] if self.features else features
            features = torch.cat([others, features])
            if added is not None:
                added = torch.cat([added if self.added is None else self.added[: rows.start], added])
        earlier = self.features[-1:] if self.skipping.order else []
        self.features, self.added = [*earlier, (number, features)], added

    def carried(self, number: int) -> torch.Tensor:
        """The features as they were at the last whole step, or further along the line through the last two."""
        at, last = self.features[-1]
        if len(self.features) < 2:
            return last
        before, earlier = self.features[-2]
        return torch.lerp(earlier, last, (number - before) / (at - before))


class Pictures:
    """What is kept of each prompt that the steps of a picture are computed with, told by its tensor."""

    def __init__(self) -> None:
        self._kept: list[Kept] = []

    def clear(self) -> None:
        self._kept = []

    def forget(self, text: object) -> None:
        """After a call for that prompt of which nothing is known."""
        self._kept = [kept for kept in self._kept if kept.text() is not text]

    def of(self, run: ScheduleRun, number: int, text: torch.Tensor, form: tuple[Any, ...], skipping: Skipping) -> Kept:
        """What is kept of the steps before; of the first step, nothing."""
        others = [kept for kept in self._kept if kept.run() is run]
        kept = next((kept for kept in others if kept.text() is text), None)
        if kept is not None:
            others = [other for other in others if other is not kept]
        if kept is None or kept.form != form or number <= kept.last:
            kept = Kept(ref(run), ref(text), skipping, number, number - 1, form)
        self._kept = [*others, kept][-_MOST_PROMPTS:]
        return kept
