"""How much a model's deep features change from one step of a picture to the next, and where whole steps are best.

A shallow step takes the features of the last whole one: what they have changed by since is its error. Whole steps that
lie where the same change adds up between them leave none with much more of it than the others.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from rocm_sd.engine.denoisers import FEATURES
from rocm_sd.rewrite import forwards

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import nn

__all__ = ["evenly_changed", "feature_changes"]


def feature_changes(model: nn.Module, depth: int, draw: Callable[[], object]) -> list[float]:
    """Of each call after the first while `draw` runs, the root mean square by which the features have changed over that
    of the features. `model` has been given shallow steps (`optimize` with a `Skipping` of this depth); here all of its
    steps are whole, and hand out their features.
    """
    before: torch.Tensor | None = None
    found: list[torch.Tensor] = []

    def answer(_model: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal before
        answered, features = inner(*args, **kwargs, **{FEATURES: (depth, None)})
        if before is not None and before.shape == features.shape:
            change = (features.float() - before.float()).norm()
            found.append(change / features.float().norm().clamp_min(1e-30))
        before = features
        return (answered,)

    take_off = forwards.surround(model, answer)
    try:
        draw()
    finally:
        take_off()
    # At the end: to read each would be to wait for each step.
    return [float(change) for change in found]


def evenly_changed(changes: Sequence[float], count: int) -> tuple[int, ...]:
    """The numbers of `count` whole steps, the first among them, between which the same change adds up. Empty where
    nothing changes, the changes are no finite numbers, or there are not so many steps.
    """
    reached = [0.0, *accumulate(changes)]
    steps = len(reached)
    if not 0 < reached[-1] < math.inf or not 0 < count <= steps:
        return ()
    found = [0]
    for number in range(1, count):
        # What is reached but for rounding is reached.
        wanted = reached[-1] * number / count * (1 - 1e-9)
        at = next(step for step, change in enumerate(reached) if change >= wanted)
        found.append(min(max(at, found[-1] + 1), steps - (count - number)))
    return tuple(found)
