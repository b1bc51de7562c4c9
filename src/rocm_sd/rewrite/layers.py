"""What every rule asks of a layer: whether its weights may be used in place of calling it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["is_plain"]

_PLAIN = (nn.Linear, nn.Conv2d)
_FORWARDS = (nn.Linear.forward, nn.Conv2d.forward)


def is_plain(layer: nn.Module) -> bool:
    """True where calling the layer is nothing but its weights' product, now: asked anew at each call.

    A LoRA wrapper is another type, a quantised or sharded weight is another kind of tensor; an offload hook, a hook of
    torch or another `forward` does more than the weights say.
    """
    own = layer.__dict__
    if type(layer) not in _PLAIN or "_hf_hook" in own or not _calls_its_class(own):
        return False
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return False
    weight = own["_parameters"]["weight"]
    return type(weight) is nn.Parameter and weight.device.type != "meta" and weight.is_floating_point()


def _calls_its_class(own: Mapping[str, Any]) -> bool:
    """accelerate leaves the class's own forward behind, as a method of the instance, when it removes its hooks."""
    forward = own.get("forward")
    return forward is None or getattr(forward, "__func__", None) in _FORWARDS
