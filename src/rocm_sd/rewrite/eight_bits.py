"""A linear whose weight is 8 bits wide, in the place of one of a model: x is rounded to 8 bits, and so is multiplied.

Beside the weight it has the scale of each of its rows, or one for all; and where x was calibrated, one scale for x.
Without that each row of x gets its own. Rules ask for these layers by `is_eight_bit`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from rocm_sd.ops import linear_8bit, quantize_rows
from rocm_sd.ops.quantize_rows.reference import LIMITS
from rocm_sd.rewrite.layers import untouched

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["EightBitLinear", "is_eight_bit", "lay_together", "product", "products", "projected", "quantized"]

_NAMES = {torch.int8: "int8", torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e4m3fnuz: "float8_e4m3fnuz"}


class EightBitLinear(nn.Linear):
    """Still a Linear, so that whoever adds to one, as a LoRA does, adds to this. Its weight is a buffer: what asks a
    model for its dtype looks at parameters.
    """

    weight: torch.Tensor  # and no parameter
    weight_scale: torch.Tensor
    x_scale: torch.Tensor | None

    def __init__(
        self, linear: nn.Linear, weight: torch.Tensor, scale: torch.Tensor, x_scale: torch.Tensor | None = None
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", scale)
        self.register_buffer("x_scale", x_scale)
        self.train(linear.training)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> EightBitLinear:
        """Onto another device it goes; another dtype is for the bias alone."""
        before = {name: value for name, value in self._buffers.items() if value is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in before.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype != value.dtype:
                self._buffers[name] = value.to(moved.device)
        return self

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        scale = self.weight_scale.unsqueeze(-1) if self.weight_scale.dim() else self.weight_scale
        return (self.weight.to(torch.float32) * scale).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return product(self, x)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {_NAMES[self.weight.dtype]}"


def quantized(weight: torch.Tensor, to: torch.dtype, *, by_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight in 8 bits, its scales, or its one scale), on the weight's device."""
    wide = weight.detach().to(torch.float32)
    if by_row:
        return quantize_rows(wide, _NAMES[to])
    scale = (wide.abs().amax() / LIMITS[_NAMES[to]]).clamp_min(torch.finfo(torch.float32).tiny)
    return quantize_rows(wide, _NAMES[to], scale.view(1))[0], scale


def is_eight_bit(layer: nn.Module) -> bool:
    """Whether calling the layer is nothing but its product in 8 bits, now."""
    return type(layer) is EightBitLinear and untouched(layer)


def product(layer: EightBitLinear, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """layer(x) + residual."""
    return products([layer], x, residual)[0]


def products(
    layers: Sequence[EightBitLinear], x: torch.Tensor, residual: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Of layers of one input, which is rounded once, by one product where their weights lie together."""
    first = layers[0]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, residual, first.bias)):
        # The gradient of a product with the weights as they are rounded; x is not.
        wide = [F.linear(x, layer.dequantized(x.dtype), layer.bias) for layer in layers]
        return wide if residual is None else [y + residual for y in wide]
    q, own = quantize_rows(x, _NAMES[first.weight.dtype], None if first.x_scale is None else first.x_scale.view(1))
    scale = own if first.x_scale is None else first.x_scale
    dtype = str(x.dtype).removeprefix("torch.")
    packed = _packed(layers) if len(layers) > 1 and residual is None else None
    if packed is not None:
        together = linear_8bit(q, scale, *packed, None, dtype)
        return list(torch.split(together, [layer.out_features for layer in layers], -1))
    return [linear_8bit(q, scale, layer.weight, layer.weight_scale, layer.bias, residual, dtype) for layer in layers]


def projected(x: torch.Tensor, heads: int, *layers: EightBitLinear) -> tuple[torch.Tensor, ...]:
    """[B, S, H, D] of each layer."""
    return tuple(y.view(*y.shape[:-1], heads, y.shape[-1] // heads) for y in products(layers, x))


def lay_together(layers: Sequence[EightBitLinear]) -> None:
    """So that they are read as one: their weights and scales become views of one storage."""
    for name in ("weight", "weight_scale"):
        values = [layer._buffers[name] for layer in layers]  # noqa: SLF001
        parts = [value for value in values if value is not None]
        if parts[0].dim():
            together = torch.cat([part.view(torch.int8) if part.element_size() == 1 else part for part in parts])
            for layer, part in zip(layers, torch.split(together, [len(part) for part in parts]), strict=True):
                layer._buffers[name] = part.view(parts[0].dtype)  # noqa: SLF001


def _packed(
    layers: Sequence[EightBitLinear],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
    """(weight, scale, bias) of layers that lie together: views, to be used now and not kept."""
    # An address is no part of a traced graph.
    if torch.compiler.is_compiling() or any(layer.bias is not None for layer in layers):
        return None
    weight, scale = _as_neighbours([each.weight for each in layers]), _as_neighbours([e.weight_scale for e in layers])
    return None if weight is None or scale is None else (weight, scale, None)


def _as_neighbours(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    first = parts[0]
    if not first.dim():
        return first if all(part is first for part in parts) else None
    end, rows = first.data_ptr(), 0
    for part in parts:
        if part.data_ptr() != end or part.shape[1:] != first.shape[1:] or not part.is_contiguous():
            return None
        end += part.numel() * part.element_size()
        rows += len(part)
    # Two allocations may touch by chance: torch refuses a view that leaves the storage of the first.
    with suppress(RuntimeError):
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    return None
