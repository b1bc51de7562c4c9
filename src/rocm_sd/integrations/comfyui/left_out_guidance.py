"""Guidance left out of ComfyUI's steps: the half of a batch without the prompt is not computed where a setting says so.

The host asks for the answers to both prompts at once (WrappersMP.CALC_COND_BATCH) and gets denoised pictures. What is
reused between steps is the difference of the UNet's own answers, as in the engine: a denoised picture has it times a
factor that follows from sigma, which the host's own `calculate_denoised` tells.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from rocm_sd.integrations.ldm import here

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rocm_sd.integrations.ldm import HostSetting

__all__ = ["LeftOutGuidance"]


@dataclass
class _Kept:
    """Of one picture: since step `first`, the last call at `last`. `difference`: of the UNet's answers, and to what."""

    run: ref[Any]
    whose: Any
    first: int
    last: int
    difference: torch.Tensor | None = None
    why: str | None = None


class LeftOutGuidance:
    """`step_of`: which step of which run a sigma is, or why that cannot be told."""

    def __init__(
        self,
        setting_of: Callable[[int], HostSetting | None],
        step_of: Callable[[Any, dict[str, Any]], tuple[tuple[Any, int, int] | None, str | None]],
    ) -> None:
        self._setting_of, self._step_of = setting_of, step_of
        self._kept: _Kept | None = None
        self.counts: Counter[str] = Counter()
        self.computed_because: Counter[str] = Counter()

    def clear(self) -> None:
        self._kept = None

    def wrapper(self, executor: Any, model: Any, conds: Any, x: Any, timestep: Any, model_options: Any) -> Any:
        if torch.compiler.is_compiling() or not isinstance(conds, (list, tuple)) or len(conds) != 2 or None in conds:
            # Without guidance there is nothing to leave out.
            return executor(model, conds, x, timestep, model_options)
        told, reason = self._step_of(timestep, model_options.get("transformer_options", {}))
        setting = None if told is None else self._setting_of(told[2])
        if told is None or setting is None or not setting.skipping.skips_guidance:
            if setting is None:
                self.computed_because[reason or "nothing was measured for so many steps"] += 1
            return executor(model, conds, x, timestep, model_options)
        run, number, count = told
        kept = self._kept_of(run, number, _identity(conds))
        reason = kept.why or _why_not(conds, model_options)
        step = here(setting.skipping).step(number, kept.first, count)
        if reason is not None or step.guided or (step.difference and kept.difference is None):
            if reason is not None:
                self.computed_because[reason] += 1
            with_prompt, without = executor(model, conds, x, timestep, model_options)
            kept.difference = (with_prompt - without) / _factor(model, timestep, x)
            return [with_prompt, without]
        with_prompt = executor(model, [conds[0], None], x, timestep, model_options)[0]
        if not step.difference:
            self.counts["without guidance"] += 1
            return [with_prompt, with_prompt]
        self.counts["with guidance reused"] += 1
        assert kept.difference is not None
        return [with_prompt, with_prompt - kept.difference * _factor(model, timestep, x)]

    def _kept_of(self, run: Any, number: int, whose: Any) -> _Kept:
        kept = self._kept
        if kept is None or kept.run() is not run or kept.whose != whose or number < kept.last:
            kept = self._kept = _Kept(ref(run), whose, number, number - 1)
        if kept.last == number:
            kept.why = "it is called more than once at one step"
        kept.last = number
        return kept

    def notes(self) -> Sequence[str]:
        found = [f"guidance: {steps} steps so far {how}" for how, steps in self.counts.items()]
        computed = self.computed_because.items()
        return [*found, *(f"guidance: {steps} steps compute it, because {reason}" for reason, steps in computed)]


def _identity(conds: Any) -> tuple[Any, ...]:
    """Of the prompts of both sides: the host gives each an id, which is new for each sampling."""
    return tuple(tuple(str(each.get("uuid")) for each in side) for side in conds)


def _why_not(conds: Any, model_options: dict[str, Any]) -> str | None:
    for name in ("sampler_cfg_function", "sampler_pre_cfg_function", "sampler_post_cfg_function"):
        if model_options.get(name):
            return "another node computes guidance in its own way"
    prompts = [each for side in conds for each in side]
    if any(each.get("control") is not None for each in prompts):
        return "a ControlNet adds to its layers"
    if any(each.get(name) is not None for each in prompts for name in ("timestep_start", "timestep_end", "hooks")):
        return "a prompt is not the same in all steps"
    return None


def _factor(model: Any, timestep: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """By which what the UNet answers counts in a denoised picture."""
    one = torch.ones_like(x[:, :1, :1, :1], dtype=torch.float32)
    factor: torch.Tensor = model.model_sampling.calculate_denoised(timestep.float(), one, torch.zeros_like(one))
    return factor.to(x.dtype)
