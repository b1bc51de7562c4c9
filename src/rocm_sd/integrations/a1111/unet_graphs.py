"""Calls of the host's UNet from graphs: what of engine/capture the host decides."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from rocm_sd.engine.capture import CapturedCalls, HostCall, Policy, why_foreign_layer
from rocm_sd.integrations.a1111 import messages
from rocm_sd.integrations.a1111.class_forwards import identities
from rocm_sd.integrations.a1111.permission import PERMISSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

__all__ = ["UnetGraphs"]

_PACKAGES = frozenset({"torch", "ldm", "sgm"})


class _Policy(Policy):
    # The host runs a half precision model under autocast.
    under_autocast = True

    def why_not(self, model: nn.Module, device: torch.device) -> str | None:  # noqa: ARG002 -- it is where it was
        return why_foreign_layer(model, _PACKAGES, methods=("forward", "_forward"))

    def say(self, sentence: str) -> None:
        messages.say(sentence)


class UnetGraphs:
    """Of one UNet, which it does not keep alive."""

    def __init__(self, unet: nn.Module) -> None:
        self._unet = ref(unet)
        self._device = next(unet.parameters()).device
        self._kinds = {type(module) for module in unet.modules() if type(module).__module__.startswith(("ldm", "sgm"))}
        self.calls = CapturedCalls(unet, _Policy("the UNet"))

    def __call__(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the UNet gives by `original`, its own forward."""
        held, device = self._unet, self._device
        autocast, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)

        def run(*args: Any, **kwargs: Any) -> Any:
            # Autocast keeps casts of weights for its next use: a graph would read them after they are gone.
            with PERMISSION.a_whole_call(), torch.autocast(device.type, dtype, enabled=autocast, cache_enabled=False):
                return original(held(), *args, **kwargs)

        also = (autocast, dtype, identities(self._kinds))
        return self.calls(HostCall(args, kwargs, device, partial(run, *args, **kwargs), run, also))
