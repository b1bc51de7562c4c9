"""Shallow steps of ComfyUI's UNet: which step a call is, by its sigma, and for which prompts it is made.

The host hands both over with each call (`transformer_options`): the sampler's sigmas and the call's own, and of each
part of the batch whether it has the prompt, with an id of the prompt that is new for each sampling. The number of steps
that the sampler has reported has to go together with that: one of higher order looks ahead in its sigmas.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isclose
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from rocm_sd.engine.capture import why_foreign_layer
from rocm_sd.integrations.comfyui.comfyui_policy import PACKAGES, plain_branch, why_not_plain
from rocm_sd.integrations.comfyui.host import belongs_to_the_host
from rocm_sd.integrations.comfyui.left_out_guidance import LeftOutGuidance
from rocm_sd.integrations.ldm import HostPasses, ShallowSteps, Told

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from rocm_sd.integrations.comfyui.comfyui_policy import StepGraph
    from rocm_sd.integrations.ldm import HostSetting

__all__ = ["ApproximatedSteps"]

# Samplers of second order come to the next step's sigma by other roundings. The host's own search allows as much.
_SAME = 1e-4


@dataclass(eq=False)
class _Sampling:
    """A sampler at work: its sigmas, those of its steps as numbers, and how many of these it has reported."""

    schedule: Any
    sigmas: list[float]
    done: int = 0


class ApproximatedSteps:
    """`wrapper` is what the host calls around the UNet (WrappersMP.DIFFUSION_MODEL), in place of the graphs' own, and
    `sampling` what it calls around a sampler (WrappersMP.SAMPLER_SAMPLE).
    """

    def __init__(self, unet: nn.Module, settings: Sequence[HostSetting], graph: StepGraph | None) -> None:
        self._unet = ref(unet)
        self._graph = graph
        self.steps = ShallowSteps(settings, belongs_to_the_host)
        self.guidance = LeftOutGuidance(self.steps.of_steps, self._step_of)
        self._sampling: _Sampling | None = None

    def sampling(
        self, executor: Any, model: Any, sigmas: Any, extra_args: Any, callback: Any, *args: Any, **kwargs: Any
    ) -> Any:
        before = self._sampling
        # The last one is where the sampler arrives.
        steps = sigmas.tolist()[:-1] if isinstance(sigmas, torch.Tensor) and sigmas.dim() == 1 else []
        sampling = self._sampling = _Sampling(sigmas, steps)

        def counted(step: Any, *seen: Any) -> None:
            sampling.done = step + 1
            if callback is not None:
                callback(step, *seen)

        try:
            return executor(model, sigmas, extra_args, counted, *args, **kwargs)
        finally:
            self._sampling = before
            self.steps.clear()
            self.guidance.clear()

    def wrapper(
        self,
        executor: Any,
        x: torch.Tensor,
        timesteps: Any = None,
        context: Any = None,
        y: Any = None,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        options = {} if transformer_options is None else transformer_options

        def exact() -> Any:
            if self._graph is None:
                return stock()
            return self._graph.wrapper(executor, x, timesteps, context, y, control, options, **kwargs)

        def stock() -> Any:
            return executor(x, timesteps, context, y, control, options, **kwargs)

        if torch.compiler.is_compiling():
            return exact()
        unet, args = self._unet(), (x, timesteps, context, y)
        told, reason = self._told(x, context, y, options)
        reason = reason or _why_exact(unet, executor, control, options, kwargs)

        def plain(depth: int, features: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            return plain_branch(executor, args, options, depth, features)

        def branch(depth: int, features: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            graph = self._graph
            return plain(depth, features) if graph is None else graph.branch(executor, args, options, depth, features)

        def why_not() -> str | None:
            return None if unet is None else why_foreign_layer(unet, PACKAGES, own_hooks=True)

        return self.steps.answer(unet, told, reason, HostPasses(exact, stock, branch, plain, why_not))

    def _told(self, x: Any, context: Any, y: Any, options: dict[str, Any]) -> tuple[Told | None, str | None]:
        """Which step it is, or why that cannot be told."""
        step, reason = self._step_of(options.get("sigmas"), options)
        if step is None:
            return None, reason
        sampling, number, count = step
        whose, prompts = options.get("cond_or_uncond"), options.get("uuids")
        if not isinstance(whose, list) or not isinstance(prompts, list) or not whose or len(whose) != len(prompts):
            return None, "the host does not say which prompts it is called for"
        if type(x) is not torch.Tensor or type(context) is not torch.Tensor or x.shape[0] % len(whose):
            return None, "it is called in another form than the host's samplers call it"
        every = x.shape[0] // len(whose)

        def kind(whose: Sequence[Any], prompts: Sequence[Any]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
            rows = (every * len(whose), *x.shape[1:]), (every * len(whose), *context.shape[1:])
            labels = None if y is None else (every * len(whose), *y.shape[1:])
            return tuple(map(str, (*whose, *prompts))), (rows[0], x.dtype, x.device, rows[1], labels)

        parts = tuple(
            (kind(whose[at : at + 1], prompts[at : at + 1]), slice(at * every, (at + 1) * every))
            for at in range(len(whose) if len(whose) > 1 else 0)
        )
        return Told(sampling, number, count, *kind(whose, prompts), parts=parts), None

    def _step_of(self, sigmas: Any, options: dict[str, Any]) -> tuple[tuple[_Sampling, int, int] | None, str | None]:
        """(the sampler at work, the number of its step, how many there are), or why that cannot be told."""
        sampling = self._sampling
        if (
            sampling is None
            or options.get("sample_sigmas") is not sampling.schedule
            or not isinstance(sigmas, torch.Tensor)
        ):
            return None, "the sampler does not say which step it is"
        values = set(sigmas.flatten().tolist())
        numbers = [
            at for at, one in enumerate(sampling.sigmas) if all(isclose(one, two, rel_tol=_SAME) for two in values)
        ]
        if len(numbers) != 1:
            return None, "its sigma is not one of the sampler's steps"
        if numbers[0] != sampling.done:
            return None, "the sampler has not come to the step of its sigma"
        return (sampling, numbers[0], len(sampling.sigmas)), None

    def detached(self, patcher: Any, unpatch_all: bool) -> None:
        self.steps.clear()
        if self._graph is not None:
            self._graph.detached(patcher, unpatch_all)


def _why_exact(
    unet: nn.Module | None, executor: Any, control: Any, options: dict[str, Any], kwargs: dict[str, Any]
) -> str | None:
    if control is not None:
        return "a ControlNet adds to its layers"
    reason = why_not_plain(unet, executor, options, kwargs)
    if reason is None and executor.original.__func__ is not getattr(type(unet), "_forward", None):
        return "another node has replaced its forward"
    return reason
