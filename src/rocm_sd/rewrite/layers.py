"""What every rule asks of a module before it does the module's work itself. Asked anew at each call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["hooked", "idle", "is_layer_norm", "is_plain", "untouched", "weight_and_bias"]

_PLAIN = (nn.Linear, nn.Conv2d)
_HANDS_ON = (nn.Dropout, nn.Identity)


def is_plain(layer: nn.Module) -> bool:
    """True where calling the layer is nothing but its weights' product, now.

    A LoRA wrapper is another type, and a quantised or sharded weight is another kind of tensor.
    """
    if type(layer) not in _PLAIN or not untouched(layer):
        return False
    weight = layer.__dict__["_parameters"]["weight"]
    return type(weight) is nn.Parameter and not weight.is_meta and weight.is_floating_point()


def weight_and_bias(layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of a layer that is nothing but them. Not through attributes, which nn.Module looks up in Python."""
    own = layer.__dict__["_parameters"]
    return own["weight"], own["bias"]


def untouched(*modules: nn.Module) -> bool:
    """True where calling each module is nothing but its class's forward, now: no hook, no offload, no other forward."""
    for module in modules:
        own = module.__dict__
        if hooked(own):
            return False
        forward = own.get("forward")
        # A hook that accelerate took off again leaves the class's own forward on the instance.
        if forward and getattr(forward, "__func__", None) is not type(module).forward:
            return False
    return True


def hooked(own: Mapping[str, Any]) -> bool:
    """Whether a module with these attributes has a hook that is called around its forward, torch's or an offload's."""
    return bool(
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "_hf_hook" in own
        or ("_diffusers_hook" in own and own["_diffusers_hook"].hooks)
    )


def is_layer_norm(norm: nn.Module) -> bool:
    """Whether calling it is nothing but `layer_norm` over the columns that its weight has, now."""
    if type(norm) is not nn.LayerNorm or not untouched(norm):
        return False
    weight = norm.__dict__["_parameters"]["weight"]
    return weight is not None and norm.__dict__["normalized_shape"] == weight.shape


def idle(*layers: nn.Module) -> bool:
    """Whether these hand on what they get, now: dropouts that are not at work."""
    for layer in layers:
        if type(layer) not in _HANDS_ON or not untouched(layer):
            return False
        if isinstance(layer, nn.Dropout) and layer.training and layer.p:
            return False
    return True
