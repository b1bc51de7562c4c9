"""Encode or decode one picture in strips of rows, layer by layer, within a budget of the device's memory.

Tiles that go through the whole model one by one have two faults: each norm sees a tile's own mean and spread, and each
convolution sees zeros where the neighbour is. Here a layer is finished for all rows before the next one begins: a strip
takes one row of its neighbours along, and a norm takes mean and spread of all rows, which were summed up while they
were written. So there is nothing to blend: the picture is the one that is computed whole, but for rounding.
The maps between layers stay on the device as long as they fit, and are in the host's memory otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.func import functional_call

from rocm_sd.engine.vae.plan import scores_bytes
from rocm_sd.engine.vae.steps import Kind, VaeStep
from rocm_sd.ops import attention

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

__all__ = ["Safety", "Store", "in_strips"]

# Fewer rows would be mostly halo.
_LEAST_ROWS = 4
# The share of the budget that one strip and what is computed from it may take.
_FOR_STRIPS = 0.25
# A step whose result is that far below the largest number of float16 leaves room for what the next one adds to it.
_ROOM_BELOW = 0.5


@dataclass
class Safety:
    """A step whose result is not finite is taken again in `dtype`; `widened` are those that were."""

    dtype: torch.dtype
    widened: list[str] = field(default_factory=list)


@dataclass
class Store:
    """Where maps are kept: on the device up to `budget` bytes, then in the host."""

    device: torch.device
    budget: int
    channels_last: bool
    used: int = 0

    @property
    def strip_bytes(self) -> int:
        return int(self.budget * _FOR_STRIPS)

    def empty(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        """An unfilled map, and how many bytes of the device it takes."""
        size = dtype.itemsize * shape[0] * shape[1] * shape[2] * shape[3]
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        if self.device.type == "cpu" or self.used + size <= self.budget - self.strip_bytes:
            self.used += size
            return torch.empty(shape, dtype=dtype, device=self.device, memory_format=layout), size
        return self.empty_in_host(shape, dtype, layout), 0

    def empty_in_host(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, layout: torch.memory_format
    ) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, memory_format=layout)


class _Map:
    """Rows of [1, C, H, W], each written once, and what a norm wants to know of all of them."""

    def __init__(self, store: Store, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self._store = store
        self._data, self._on_device = store.empty(shape, dtype)
        self._wide = torch.promote_types(dtype, torch.float32)
        # Pixels, mean and sum of squared differences of each channel, merged strip by strip: no cancellation.
        self._pixels = 0
        self._mean = torch.zeros(shape[1], dtype=self._wide, device=store.device)
        self._squares = torch.zeros_like(self._mean)
        self._largest = torch.zeros((), dtype=self._wide, device=store.device)

    @classmethod
    def of(cls, store: Store, tensor: torch.Tensor) -> _Map:
        made = cls(store, (1, *tensor.shape[1:]), tensor.dtype)
        made.write(0, tensor)
        return made

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        return self._data[:, :, start:stop].to(self._store.device, dtype)

    def write(self, start: int, rows: torch.Tensor) -> None:
        self._data[:, :, start : start + rows.shape[2]] = rows
        wide = rows.to(self._wide)
        squares, mean = torch.var_mean(wide, dim=(0, 2, 3), correction=0)
        pixels = rows.shape[2] * rows.shape[3]
        total = self._pixels + pixels
        apart = mean - self._mean
        self._mean = self._mean + apart * (pixels / total)
        self._squares = self._squares + squares * pixels + apart.square() * (self._pixels * pixels / total)
        self._pixels = total
        self._largest = torch.maximum(self._largest, torch.maximum(wide.amax(), -wide.amin()))

    def normed(self, norm: nn.GroupNorm) -> Callable[[torch.Tensor], torch.Tensor]:
        """norm as of the whole map, for strips of it; float32 or wider."""
        groups, channels = norm.num_groups, self.shape[1]
        means = self._mean.view(groups, -1)
        mean = means.mean(1, keepdim=True)
        variance = (self._squares.view(groups, -1) / self._pixels + (means - mean).square()).mean(1, keepdim=True)
        scale = (variance + norm.eps).rsqrt().expand_as(means).reshape(1, channels, 1, 1)
        centre = mean.expand_as(means).reshape(1, channels, 1, 1)
        if norm.weight is not None:
            scale = scale * norm.weight.to(self._wide).view(1, channels, 1, 1)
        shift = None if norm.bias is None else norm.bias.to(self._wide).view(1, channels, 1, 1)

        def apply(rows: torch.Tensor) -> torch.Tensor:
            y = torch.sub(rows, centre).mul_(scale)
            return y if shift is None else y.add_(shift)

        return apply

    def is_finite(self) -> bool:
        return bool(torch.isfinite(self._largest))

    def fits(self, dtype: torch.dtype) -> bool:
        return bool(self._largest <= torch.finfo(dtype).max * _ROOM_BELOW)

    def whole(self) -> torch.Tensor:
        return self.rows(0, self.shape[2], self.dtype)

    def free(self) -> None:
        self._store.used -= self._on_device
        del self._data


def in_strips(steps: tuple[VaeStep, ...], x: torch.Tensor, store: Store, safety: Safety | None = None) -> torch.Tensor:
    """The steps on one picture [1, C, H, W]. With `safety`, a step's result is looked at before the next one begins."""
    narrow = x.dtype
    here = _Map.of(store, x)
    for step in steps:
        there = _run(step, here, store, narrow) if safety is None else _checked(step, here, store, narrow, safety)
        here.free()
        here = there
    y = here.whole()
    here.free()
    return y.to(narrow)


def _checked(step: VaeStep, x: _Map, store: Store, narrow: torch.dtype, safety: Safety) -> _Map:
    if x.fits(narrow):
        y = _run(step, x, store, narrow)
        if y.is_finite():
            return y
        y.free()
    safety.widened.append(step.path)
    return _run(step, x, store, safety.dtype, cast=True)


def _run(step: VaeStep, x: _Map, store: Store, dtype: torch.dtype, *, cast: bool = False) -> _Map:
    """`cast`: the layers have weights of another dtype, which are turned to `dtype` for each call of a layer."""
    strips = _Strips(store, dtype, cast)
    module: Any = step.module
    if step.kind is Kind.RESNET:
        return _resnet(strips, module, x)
    if step.kind is Kind.ATTENTION:
        return _attention(strips, module, x)
    if step.kind is Kind.OUT:
        return strips.layer(module.conv_out, x, norm=module.conv_norm_out, silu=True)
    if step.kind is Kind.UPSAMPLE:
        return strips.upsampled(module, x)
    if step.kind is Kind.DOWNSAMPLE:
        return strips.downsampled(module, x)
    return strips.layer(module, x)


def _resnet(strips: _Strips, module: Any, x: _Map) -> _Map:
    hidden = strips.layer(module.conv1, x, norm=module.norm1, silu=True)

    def with_shortcut(y: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        rows = x.rows(start, stop, strips.dtype)
        if module.conv_shortcut is not None:
            rows = strips.call(module.conv_shortcut, rows)
        y = rows + y
        return y if module.output_scale_factor == 1.0 else y / module.output_scale_factor

    y = strips.layer(module.conv2, hidden, norm=module.norm2, silu=True, then=with_shortcut, extra=x.shape[1])
    hidden.free()
    return y


def _attention(strips: _Strips, module: Any, x: _Map) -> _Map:
    """Keys and values of all pixels, then the queries strip by strip."""
    _, C, H, W = x.shape
    norm, heads, dtype = x.normed(module.group_norm), module.heads, strips.dtype

    def tokens(start: int, stop: int) -> torch.Tensor:
        return norm(x.rows(start, stop, dtype)).to(dtype).permute(0, 2, 3, 1).flatten(1, 2)

    store, size = strips.store, H * W * C * dtype.itemsize
    # Always on the device: 32 MB of SDXL at 1024x1024, where the maps of the last block take 512 MB each.
    keys, values = (torch.empty((1, H * W, C), dtype=dtype, device=store.device) for _ in range(2))
    store.used += 2 * size
    for start, stop in strips.of(H, W * C * (3 * dtype.itemsize + 4)):
        rows = tokens(start, stop)
        keys[:, start * W : stop * W] = strips.call(module.to_k, rows)
        values[:, start * W : stop * W] = strips.call(module.to_v, rows)
    keys, values = (t.view(1, H * W, heads, -1) for t in (keys, values))
    scores = scores_bytes(1, H * W, heads, keys.shape[-1], dtype, keys.device, op=True)
    # Where scores are written to memory, as many queries at a time as keep them within the strips' share.
    at_once = H * W if scores <= strips.bytes else max(1, strips.bytes // (8 * heads * H * W))
    y = strips.new(x.shape)
    for start, stop in strips.of(H, W * C * (6 * dtype.itemsize + 4)):
        queries = strips.call(module.to_q, tokens(start, stop)).view(1, (stop - start) * W, heads, -1)
        mixed = torch.cat([attention(part, keys, values) for part in torch.split(queries, at_once, dim=1)], dim=1)
        rows = strips.call(module.to_out[0], mixed.flatten(2)).view(1, stop - start, W, C).permute(0, 3, 1, 2)
        if module.residual_connection:
            rows = rows + x.rows(start, stop, dtype)
        y.write(start, rows if module.rescale_output_factor == 1.0 else rows / module.rescale_output_factor)
    store.used -= 2 * size
    return y


@dataclass(frozen=True)
class _Strips:
    store: Store
    dtype: torch.dtype
    cast: bool

    @property
    def bytes(self) -> int:
        return self.store.strip_bytes

    def new(self, shape: tuple[int, int, int, int]) -> _Map:
        return _Map(self.store, shape, self.dtype)

    def of(self, H: int, row_bytes: int) -> Iterator[tuple[int, int]]:
        """(start, stop) of strips with as many rows as the strips' share has room for."""
        rows = max(_LEAST_ROWS, self.bytes // row_bytes)
        for start in range(0, H, rows):
            yield start, min(start + rows, H)

    def call(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        # The module's own parameters stay as they are: nothing is left to undo, and a captured graph keeps its weights.
        weights = {name: p.to(self.dtype) for name, p in layer.named_parameters()} if self.cast else {}
        y: torch.Tensor = functional_call(layer, weights, (x,)) if self.cast else layer(x)
        return y

    def layer(
        self,
        layer: Any,
        x: _Map,
        *,
        norm: nn.GroupNorm | None = None,
        silu: bool = False,
        then: Callable[[torch.Tensor, int, int], torch.Tensor] | None = None,
        extra: int = 0,
    ) -> _Map:
        """then(layer(silu(norm(x)))) of a convolution that keeps the size; `extra` channels are read by `then`."""
        _, C, H, W = x.shape
        channels = _channels_out(layer)
        normed = None if norm is None else x.normed(norm)
        y = self.new((1, channels, H, W))
        # Read, normed in float32, turned back; computed, added, and looked at in float32.
        row_bytes = W * (
            C * (2 * self.dtype.itemsize + 4) + (extra + 3 * channels) * self.dtype.itemsize + 4 * channels
        )
        for start, stop in self.of(H, row_bytes):
            first, last = max(start - 1, 0), min(stop + 1, H)
            rows = x.rows(first, last, self.dtype)
            if normed is not None:
                rows = normed(rows)
                rows = (F.silu(rows, inplace=True) if silu else rows).to(self.dtype)
            rows = self.call(layer, rows)[:, :, start - first : stop - first]
            y.write(start, rows if then is None else then(rows, start, stop))
        return y

    def upsampled(self, module: Any, x: _Map) -> _Map:
        _, C, H, W = x.shape
        layer = module.conv if module.name == "conv" else module.Conv2d_0
        channels = _channels_out(layer)
        y = self.new((1, channels, 2 * H, 2 * W))
        row_bytes = W * (C * 5 * self.dtype.itemsize + 8 * channels * (self.dtype.itemsize + 4))
        for start, stop in self.of(H, row_bytes):
            first, last = max(start - 1, 0), min(stop + 1, H)
            rows = self.call(module, x.rows(first, last, self.dtype))
            y.write(2 * start, rows[:, :, 2 * (start - first) : 2 * (stop - first)])
        return y

    def downsampled(self, module: Any, x: _Map) -> _Map:
        """A row of the result reads three, from twice its number on; the module adds the one below the last."""
        _, C, H, W = x.shape
        channels = _channels_out(module.conv)
        y = self.new((1, channels, H // 2, W // 2))
        row_bytes = W * (C * 4 * self.dtype.itemsize + channels * (self.dtype.itemsize + 4))
        for start, stop in self.of(H // 2, row_bytes):
            rows = self.call(module, x.rows(2 * start, min(2 * stop + 1, H), self.dtype))
            y.write(start, rows[:, :, : stop - start])
        return y


def _channels_out(layer: Any) -> int:
    return int(getattr(layer, "base_layer", layer).weight.shape[0])
