"""Convolutions' weights channels-last while an optimised model is in use, and as the host had them at all other times.

ComfyUI tells when: it "injects" once a patched model is loaded, and "ejects" before weights are changed, moved or
used by anybody else. Each weight is laid out anew in the memory that it has: graphs that read it stay valid, and no
second copy is kept.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn

from rocm_sd.rewrite.convolutions import through_op
from rocm_sd.rewrite.forwards import is_ours

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ChannelsLast"]


class ChannelsLast:
    """`part`: what of the host's model it is for. Several clones of one model share it, and may be injected in turn."""

    def __init__(self, part: Callable[[Any], nn.Module], why: str) -> None:
        self._part = part
        self._why = why
        # Tensors are no keys: two of them are compared value by value.
        self._relaid: list[tuple[weakref.ref[nn.Parameter], tuple[int, ...]]] = []
        self._owner: weakref.ref[Any] | None = None
        self._followed: WeakSet[Any] = WeakSet()
        self._count = 0
        self._in_part = False

    def inject(self, patcher: Any) -> None:
        self._owner = weakref.ref(patcher)
        # A patcher that is dropped while its model is loaded is never asked to eject.
        if patcher not in self._followed:
            self._followed.add(patcher)
            weakref.finalize(patcher, self._dropped, self._owner).atexit = False
        # Where some layers come in for each call as the host has them, two layouts side by side would cost copies.
        self._in_part = bool(getattr(patcher.model, "model_lowvram", False))
        if self._in_part:
            return
        device = patcher.load_device
        for layer in self._part(patcher.model).modules():
            if isinstance(layer, nn.Conv2d) and _is_at_rest(layer, device):
                self._relay(layer.weight)
        self._count = len(self._relaid)

    def eject(self, _patcher: Any) -> None:
        self._owner = None
        for held, strides in self._relaid:
            weight = held()
            # Whoever gave it other memory in between has laid it out, too.
            if weight is not None and weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last):
                _lay(weight, strides)
        self._relaid.clear()

    def _dropped(self, owner: weakref.ref[Any]) -> None:
        if self._owner is owner:
            self.eject(None)

    def _relay(self, weight: Any) -> None:
        if weight.is_contiguous() and not weight.is_contiguous(memory_format=torch.channels_last):
            self._relaid.append((weakref.ref(weight), weight.stride()))
            _, channels, height, width = weight.shape
            _lay(weight, (height * width * channels, 1, width * channels, channels))

    def notes(self) -> list[str]:
        if self._in_part:
            return ["convolutions keep their layout, and their blocks are ComfyUI's own: it is loaded in part"]
        return [f"{self._count} convolutions run channels-last ({self._why})"] if self._count else []


def _is_at_rest(layer: Any, device: torch.device) -> bool:
    """Whether its weight stays on the device between calls: those that are brought in for each are skipped."""
    weight = layer.weight
    if type(weight) is not nn.Parameter or weight.dim() != 4 or weight.device.type != device.type:
        return False
    if getattr(layer, "comfy_cast_weights", False) or is_ours(layer.__dict__.get("forward")):
        return False
    return through_op("conv2d", weight)


def _lay(weight: nn.Parameter, strides: tuple[int, ...]) -> None:
    """The same values in the same memory, in another order."""
    # What the host made in inference mode can be written there only.
    with torch.inference_mode(mode=weight.is_inference()), torch.no_grad():
        memory = weight.detach()
        values = memory.clone()
        there = memory.as_strided(memory.shape, strides, memory.storage_offset())
        there.copy_(values)
        weight.data = there
