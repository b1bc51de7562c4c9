"""Calls of ComfyUI's UNet from graphs: what of engine/capture the host decides.

The host's loop stays its own, so previews, interrupts and samplers see nothing of it. What another node has put into
the model, and what is not known, is never captured: the call then runs as it would without graphs, and the reason is
noted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod, ref

import torch

from rocm_sd.engine import free_memory
from rocm_sd.engine.capture import CapturedCalls, HostCall, Policy, why_foreign_layer
from rocm_sd.integrations.comfyui.attention import OPTION, is_our_override
from rocm_sd.integrations.comfyui.comfyui_policy import fused
from rocm_sd.integrations.comfyui.host import belongs_to_the_host, say

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

__all__ = ["StepGraph"]

# Level auto captures while so much of the card's memory is free.
_FREE_FOR_AUTO = 0.25
_PACKAGES = frozenset({"comfy", "torch"})
# What the host puts there for patches and for its own bookkeeping. A UNet without patches reads none of them.
_READ_BY_PATCHES_ONLY = frozenset({
    "activations_shape", "block", "block_index", "callbacks", "cond_or_uncond", "original_shape", "patches",
    "patches_replace", "sample_sigmas", "sigmas", "transformer_index", "uuids", "wrappers", OPTION,
})  # fmt: skip


class _Policy(Policy):
    def __init__(self, level: str) -> None:
        super().__init__("the UNet")
        self._level = level

    def why_not(self, model: nn.Module, device: torch.device) -> str | None:
        reason = why_foreign_layer(model, _PACKAGES, own_hooks=True)
        return reason or _why_weights(model, device) or self._why_no_room(device)

    def dtype(self, model: nn.Module, call: HostCall) -> torch.dtype:  # noqa: ARG002 -- weights may be cast in each call
        found: torch.dtype = call.args[0].dtype
        return found

    def propagates(self, error: Exception) -> bool:
        # An interrupt is reset by being raised: it must reach the host. Memory may do for the call itself.
        return belongs_to_the_host(error) and not isinstance(error, torch.OutOfMemoryError)

    def say(self, sentence: str) -> None:
        say(sentence)

    def _why_no_room(self, device: torch.device) -> str | None:
        if self._level == "performance" or device.type != "cuda":
            return None
        free, total = free_memory(device), torch.cuda.get_device_properties(device).total_memory
        if free is None or free >= _FREE_FOR_AUTO * total:
            return None
        return f"level auto captures while {_FREE_FOR_AUTO:.0%} of the memory is free, and {free / total:.0%} is"


class StepGraph:
    """`wrapper` is what the host calls around the UNet (WrappersMP.DIFFUSION_MODEL)."""

    def __init__(self, unet: nn.Module, level: str) -> None:
        self._unet = ref(unet)
        self.calls = CapturedCalls(unet, _Policy(level))

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

        def eager() -> Any:
            return executor(x, timesteps, context, y, _copied(control), options, **kwargs)

        if torch.compiler.is_compiling():
            return eager()
        override = options.get(OPTION)
        try:
            reason = self._why_eager(executor, options, kwargs)
            body = _Forward(WeakMethod(executor.original), override)
        except (AttributeError, TypeError) as error:
            reason = f"this ComfyUI's wrappers are not as they are known here ({error})"
        if reason is not None:
            self.calls.count_eager(reason)
        if reason is not None or type(x) is not torch.Tensor:
            return eager()
        return self.calls(HostCall((x, timesteps, context, y, control), {}, x.device, eager, body, override))

    def _why_eager(self, executor: Any, options: dict[str, Any], kwargs: dict[str, Any]) -> str | None:
        unet = self._unet()
        if unet is None or executor.class_obj is not unet:
            return "it is another model than the one that was optimised"
        # Those around this one run as always. One inside of it would run once, when captured.
        if executor.idx != len(executor.wrappers) - 1:
            return "another node wraps the model inside of this one"
        if any(value is not None for value in kwargs.values()):
            return f"it is called with {min(kwargs)}"
        for name in ("patches", "patches_replace"):
            for kind, found in options.get(name, {}).items():
                if found:
                    return f"another node patches it ({kind})"
        unknown = sorted(options.keys() - _READ_BY_PATCHES_ONLY)
        if unknown:
            return f"its options have {unknown[0]}, which is not known here"
        override = options.get(OPTION)
        return None if override is None or is_our_override(override) else "another node computes its attention"

    def detached(self, _patcher: Any, unpatch_all: bool) -> None:
        """The host's call once a model is given up; also between two uses of one that stays where it is."""
        if unpatch_all:
            self.calls.clear()
        else:
            self.calls.sleep()


@dataclass(frozen=True)
class _Forward:
    """The host's forward with all that is not a tensor decided: no patches, and our attention or the host's own."""

    original: WeakMethod[Callable[..., Any]]
    override: Any

    def __call__(self, x: Any, timesteps: Any, context: Any, y: Any, control: Any) -> Any:
        options = {} if self.override is None else {OPTION: self.override}
        original = self.original()
        assert original is not None
        with fused():
            return original(x, timesteps, context, y, control, options)


def _copied(control: Any) -> Any:
    """The host takes a ControlNet's tensors out of these lists as it goes: a call made twice needs them twice."""
    if not isinstance(control, dict):
        return control
    return {name: list(value) if isinstance(value, list) else value for name, value in control.items()}


def _why_weights(model: nn.Module, device: torch.device) -> str | None:
    for module in model.modules():
        if getattr(module, "weight_function", None) or getattr(module, "bias_function", None):
            return "its weights are computed around each call, as a LoRA's of a model that is loaded in part"
        parameters = module.__dict__["_parameters"].values()
        if any(parameter is not None and parameter.device != device for parameter in parameters):
            return "its weights are not all on the GPU: the host has loaded it in part"
    return None
