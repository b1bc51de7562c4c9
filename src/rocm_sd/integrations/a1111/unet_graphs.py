"""Graphs of the host's UNet: of whole calls as they are, and of passes that take features or give them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from rocm_sd.engine.capture import CapturedCalls, HostCall, Policy, why_foreign_layer
from rocm_sd.integrations.a1111 import messages
from rocm_sd.integrations.a1111.a1111_policy import PACKAGES, identities
from rocm_sd.integrations.a1111.permission import PERMISSION
from rocm_sd.integrations.ldm import run_pass

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

__all__ = ["UnetGraphs"]


class _GraphPolicy(Policy):
    # The host runs a half precision model under autocast.
    under_autocast = True

    def why_not(self, model: nn.Module, device: torch.device) -> str | None:  # noqa: ARG002 -- it is where it was
        return why_foreign_layer(model, PACKAGES, methods=("forward", "_forward"))

    def say(self, sentence: str) -> None:
        messages.say(sentence)


class UnetGraphs:
    """Calls of one UNet from graphs. It does not keep the UNet alive."""

    def __init__(self, unet: nn.Module) -> None:
        self._unet = ref(unet)
        self._device = next(unet.parameters()).device
        self._kinds = {type(module) for module in unet.modules() if type(module).__module__.startswith(("ldm", "sgm"))}
        self.calls = CapturedCalls(unet, _GraphPolicy("the UNet"))

    def __call__(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the UNet gives by `original`, its own forward."""
        held = self._unet

        def forward(*args: Any, **kwargs: Any) -> Any:
            return original(held(), *args, **kwargs)

        return self._captured(forward, args, kwargs, None)

    def branch(
        self,
        original: Callable[..., Any],
        depth: int,
        features: torch.Tensor | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A whole or a shallow pass, as a kind of call by itself: `features` is an input."""
        held = self._unet

        def forward(features: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return run_pass(original, held(), depth, features, *args, **kwargs)

        given: tuple[torch.Tensor, torch.Tensor] = self._captured(forward, (features, args, kwargs), {}, depth)
        return given

    def _captured(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], depth: int | None
    ) -> Any:
        device = self._device
        autocast, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)

        def run(*args: Any, **kwargs: Any) -> Any:
            # Autocast keeps casts of weights for its next use: a graph would read them after they are gone.
            with PERMISSION.a_whole_call(), torch.autocast(device.type, dtype, enabled=autocast, cache_enabled=False):
                return forward(*args, **kwargs)

        also = (autocast, dtype, identities(self._kinds), depth)
        return self.calls(HostCall(args, kwargs, device, partial(run, *args, **kwargs), run, also))
