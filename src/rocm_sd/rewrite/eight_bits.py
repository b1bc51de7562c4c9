"""A linear whose weight is 8 bits wide, in the place of one of a model: x is rounded to 8 bits, and so is multiplied.
On a device that does not multiply that fp8, x is left as it comes, and multiplied with the weight in its own dtype.

Beside the weight it has the scale of each of its rows, or one for all; and where x was calibrated, one scale for x.
Without that each row of x gets its own. A layer that is smoothed multiplies x by a power of two for each column first,
and has its weight divided by them. Rules ask for these layers by `is_eight_bit`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from rocm_sd import arch
from rocm_sd.ops import linear_8bit, quantize_rows
from rocm_sd.ops.eight_bits import LIMITS
from rocm_sd.ops.quantize_rows import reference
from rocm_sd.rewrite.layers import untouched

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "FORMATS",
    "EightBitLayer",
    "EightBitLinear",
    "Origin",
    "Rounded",
    "is_differentiated",
    "is_eight_bit",
    "lay_together",
    "product",
    "products",
    "projected",
    "quantized",
    "rounding",
    "rounds_x",
]

# The names of the dtypes that a weight may have.
FORMATS = {torch.int8: "int8", torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e4m3fnuz: "float8_e4m3fnuz"}


@dataclass(frozen=True)
class Rounded:
    """What comes into 8-bit layers, rounded by the norm or the gate that computed it: q * scale, a `dtype` before.

    `scale`: one for all, or one for each row.
    """

    q: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype


def rounds_x(to: torch.dtype, device: torch.device) -> bool:
    """Whether what comes into layers of that format is rounded there. To round it to a format that is not multiplied
    would lose of x and gain nothing; of int8 there are products everywhere.
    """
    return to is torch.int8 or arch.detect(device).multiplies(FORMATS[to])


@dataclass(frozen=True)
class Origin:
    """What a layer was made from. `input`: the name of the first layer of those that share its input, and so the scale
    and the smoothing of x; `digest` and `dtype`: of its weight; `error`: as it was measured for these together.
    """

    input: str
    digest: str
    dtype: str
    error: float | None


class EightBitLayer(nn.Module):
    """Of any kind. Its weight is a buffer: what asks a model for its dtype looks at parameters."""

    weight: torch.Tensor  # and no parameter
    weight_scale: torch.Tensor
    x_scale: torch.Tensor | None
    smoothing: torch.Tensor | None
    origin: Origin | None
    rounds_x: bool
    # Whether `optimize` put it there, and its weight of 16 bits waits: for this layer, and not for a copy of it.
    is_for_a_time = False

    def _take(
        self,
        layer: nn.Linear | nn.Conv2d,
        weight: torch.Tensor,
        scale: torch.Tensor,
        x_scale: torch.Tensor | None,
        smoothing: torch.Tensor | None,
        origin: Origin | None,
    ) -> None:
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", scale)
        self.register_buffer("x_scale", x_scale)
        self.register_buffer("smoothing", smoothing)
        self.origin = origin
        self.rounds_x = rounds_x(weight.dtype, weight.device)
        self.train(layer.training)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> EightBitLayer:
        """Onto another device it goes; another dtype is for the bias alone."""
        before = {name: value for name, value in self._buffers.items() if value is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in before.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype != value.dtype:
                self._buffers[name] = value.to(moved.device)
        self.rounds_x = rounds_x(self.weight.dtype, self.weight.device)
        return self


class EightBitLinear(EightBitLayer, nn.Linear):
    """Still a Linear, so that whoever adds to one, as a LoRA does, adds to this."""

    def __init__(
        self,
        linear: nn.Linear,
        weight: torch.Tensor,
        scale: torch.Tensor,
        x_scale: torch.Tensor | None = None,
        smoothing: torch.Tensor | None = None,
        origin: Origin | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._take(linear, weight, scale, x_scale, smoothing, origin)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        scale = self.weight_scale.unsqueeze(-1) if self.weight_scale.dim() else self.weight_scale
        wide = self.weight.to(torch.float32) * scale
        return (wide if self.smoothing is None else wide * self.smoothing.float()).to(dtype)

    def smoothed(self, x: torch.Tensor) -> torch.Tensor:
        """As it is rounded: powers of two lose nothing of it."""
        return x if self.smoothing is None else x * self.smoothing.to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return product(self, x)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {FORMATS[self.weight.dtype]}{'' if self.smoothing is None else ', smoothed'}"


def quantized(weight: torch.Tensor, to: torch.dtype, *, by_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight in 8 bits, its scales, or its one scale), on the weight's device.

    By the definition, as it is done once: a filter of a convolution may be wider than what a kernel takes.
    """
    wide = weight.detach().to(torch.float32)
    if by_row:
        return reference.quantize_rows(wide, FORMATS[to])
    scale = (wide.abs().amax() / LIMITS[FORMATS[to]]).clamp_min(torch.finfo(torch.float32).tiny)
    return reference.quantize_rows(wide, FORMATS[to], scale.view(1))[0], scale


def is_eight_bit(layer: nn.Module) -> bool:
    """Whether calling the layer is nothing but its product in 8 bits, now."""
    return type(layer) is EightBitLinear and untouched(layer)


def rounding(*layers: nn.Module) -> tuple[torch.Tensor | None, str] | None:
    """(scale, format) for whoever computes what comes into these layers, to round it; None where it is to come wide.

    Without a scale each row gets its own.
    """
    first = layers[0]
    if torch.is_grad_enabled() or not all(is_eight_bit(layer) for layer in layers):
        return None
    assert isinstance(first, EightBitLayer)
    # What is smoothed is multiplied before it is rounded.
    if first.smoothing is not None or not first.rounds_x:
        return None
    return first.x_scale, FORMATS[first.weight.dtype]


def is_differentiated(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def product(layer: EightBitLinear, x: torch.Tensor | Rounded, residual: torch.Tensor | None = None) -> torch.Tensor:
    """layer(x) + residual."""
    return products([layer], x, residual)[0]


def products(
    layers: Sequence[EightBitLinear], x: torch.Tensor | Rounded, residual: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Of layers of one input, which is rounded once, by one product where their weights lie together."""
    first = layers[0]
    if isinstance(x, Rounded):
        rounded = x
    elif not first.rounds_x or is_differentiated(x, residual, first.bias):
        # A gradient is that of a product with the weights as they are rounded; x is not.
        wide = [F.linear(x, layer.dequantized(x.dtype), layer.bias) for layer in layers]
        return wide if residual is None else [y + residual for y in wide]
    else:
        given = first.x_scale
        to = FORMATS[first.weight.dtype]
        q, own = quantize_rows(first.smoothed(x), to, None if given is None else given.view(1))
        rounded = Rounded(q, own if given is None else given, x.dtype)
    q, scale, dtype = rounded.q, rounded.scale, str(rounded.dtype).removeprefix("torch.")
    packed = _packed(layers) if len(layers) > 1 and residual is None else None
    if packed is not None:
        together = linear_8bit(q, scale, *packed, None, dtype)
        return list(torch.split(together, [layer.out_features for layer in layers], -1))
    return [linear_8bit(q, scale, layer.weight, layer.weight_scale, layer.bias, residual, dtype) for layer in layers]


def projected(x: torch.Tensor | Rounded, heads: int, *layers: EightBitLinear) -> tuple[torch.Tensor, ...]:
    """[B, S, H, D] of each layer."""
    return tuple(y.view(*y.shape[:-1], heads, y.shape[-1] // heads) for y in products(layers, x))


def lay_together(layers: Sequence[EightBitLinear]) -> None:
    """So that they are read as one: their weights and scales become views of one storage. A copy on another device is
    to be laid together again.
    """
    for name in ("weight", "weight_scale"):
        values = [layer._buffers[name] for layer in layers]  # noqa: SLF001
        parts = [value for value in values if value is not None]
        if _as_neighbours(parts) is not None:
            continue
        if not parts[0].dim():
            if all(torch.equal(part, parts[0]) for part in parts):
                for layer in layers:
                    layer._buffers[name] = parts[0]  # noqa: SLF001
        else:
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
