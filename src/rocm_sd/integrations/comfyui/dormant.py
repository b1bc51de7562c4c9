"""What a recording has baked in, kept while the host changes models, without keeping the weights alive.

A snapshot of the engine holds the parameters themselves. Between two uses ComfyUI may put others in their place, as for
a LoRA, and the memory of the old ones must be free by then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Dormant"]

_TENSORS = ("_parameters", "_buffers")


class Dormant:
    """Of a model that is as it was when it was recorded. Compared once, before the recording is used again."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(ref(module), _state(module)) for module in model.modules()]
        self._tensors = [(ref(tensor), tensor.data_ptr()) for tensor in _tensors(model)]

    def same(self, model: nn.Module) -> bool:
        modules, tensors = list(model.modules()), _tensors(model)
        if len(modules) != len(self._modules) or len(tensors) != len(self._tensors):
            return False
        for tensor, (known, address) in zip(tensors, self._tensors, strict=True):
            if known() is not tensor or tensor.data_ptr() != address:
                return False
        pairs = zip(modules, self._modules, strict=True)
        return all(known() is module and _equal(_state(module), state) for module, (known, state) in pairs)


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _state(module: nn.Module) -> dict[str, Any]:
    own = {name: value for name, value in module.__dict__.items() if name not in _TENSORS and name != "_modules"}
    return {name: value.copy() if isinstance(value, (dict, list, set)) else value for name, value in own.items()}


def _equal(now: dict[str, Any], then: dict[str, Any]) -> bool:
    try:
        return bool(now == then)
    except (RuntimeError, ValueError, TypeError):  # tensors and arrays have no one answer
        return False
