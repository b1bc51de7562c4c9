"""What is approximated in a pipeline: by the quality that was asked for, and by what stands against it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rocm_sd.engine.approximation.branches import can_be_approximated
from rocm_sd.engine.approximation.measured import known
from rocm_sd.engine.approximation.shipped import Setting, as_given, why_none
from rocm_sd.engine.approximation.skipping import EXACT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from rocm_sd.engine.approximation.combined import Approximation
    from rocm_sd.engine.approximation.skipping import Skipping

__all__ = ["chosen"]


def chosen(
    target: Any, models: Iterable[nn.Module], quality: str | Skipping | Approximation, *, in_halves: bool
) -> tuple[dict[nn.Module, list[Setting]], list[str]]:
    """Of each UNet and transformer what is left out, and in words why of another one nothing is. `in_halves`: whether
    the halves of a batch are computed one after the other: a step is two calls then, and none is left out.
    """
    found: dict[nn.Module, list[Setting]] = {}
    notes: list[str] = []
    if quality == "exact" or (not isinstance(quality, str) and quality.is_exact):
        return found, notes
    denoisers = [model for model in models if can_be_approximated(model)]
    if getattr(target, "scheduler", None) is None or not denoisers:
        parts = "a pipeline's UNet or transformer"
        notes.append(f"quality {quality} leaves out steps of {parts}; there is none, and all is exact")
        return found, notes
    for model in denoisers:
        kind = type(model).__name__
        settings = known(model, quality) if isinstance(quality, str) else [as_given(quality)]
        if not settings:
            notes.append(f"{kind} is exact: {why_none(model, str(quality))}")
            continue
        if in_halves and any(not setting.skipping.is_exact for setting in settings):
            settings = [_of_whole_steps(setting) for setting in settings]
            is_exact = all(setting.approximation.is_exact for setting in settings)
            said = "is exact" if is_exact else "leaves out no steps"
            notes.append(f"{kind} {said}: its level computes the halves of a batch one after the other")
            if is_exact:
                continue
        found[model] = settings
        # `parallelize` keeps this to itself where it is at work.
        if any(setting.approximation.stale_after for setting in settings):
            notes.append(f"{kind}: no rows are a step old: that needs several GPUs, and the plan patch")
    return found, notes


def _of_whole_steps(setting: Setting) -> Setting:
    """What else it says. Pictures are nearer to exact then than they were measured to be: by how much, nobody knows."""
    if setting.skipping.is_exact:
        return setting
    return replace(setting, approximation=replace(setting.approximation, skipping=EXACT), cost="")
