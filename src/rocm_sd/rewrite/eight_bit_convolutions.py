"""A convolution whose weight is 8 bits wide, in the place of one of a model: x is rounded to 8 bits, too.

x has one scale, which was calibrated: pixels with scales of their own could not be summed over the taps of a filter.
Where a norm is before it, that rounds. On a device that does not multiply that fp8, x stays as it is. Rules ask for
these layers by `is_eight_bit_convolution`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from rocm_sd.ops import conv2d_8bit, quantize_rows
from rocm_sd.rewrite.eight_bits import FORMATS, EightBitLayer, Rounded, is_differentiated
from rocm_sd.rewrite.layers import untouched

if TYPE_CHECKING:
    from typing import Any, TypeGuard

    from rocm_sd.rewrite.eight_bits import Origin

__all__ = ["EightBitConv2d", "convolved", "is_eight_bit_convolution", "rounding"]

_SHAPE = (
    "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "transposed", "output_padding",
    "groups", "padding_mode", "_reversed_padding_repeated_twice",
)  # fmt: skip


class EightBitConv2d(EightBitLayer, nn.Conv2d):
    """Still a Conv2d, so that whoever adds to one, as a LoRA does, adds to this."""

    x_scale: torch.Tensor

    def __init__(
        self,
        layer: nn.Conv2d,
        weight: torch.Tensor,
        scale: torch.Tensor,
        x_scale: torch.Tensor,
        smoothing: torch.Tensor | None = None,
        origin: Origin | None = None,
    ) -> None:
        nn.Module.__init__(self)
        for name in _SHAPE:
            setattr(self, name, getattr(layer, name))
        self.bias = layer.bias
        self._take(layer, weight.contiguous(memory_format=torch.channels_last), scale, x_scale, smoothing, origin)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        scale = self.weight_scale.view(-1, 1, 1, 1) if self.weight_scale.dim() else self.weight_scale
        return (self.weight.to(torch.float32) * scale).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return convolved(self, x)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {FORMATS[self.weight.dtype]}"  # type: ignore[no-untyped-call]


def is_eight_bit_convolution(layer: Any) -> TypeGuard[EightBitConv2d]:
    """Whether calling the layer is nothing but its convolution in 8 bits, now."""
    return type(layer) is EightBitConv2d and untouched(layer) and "_conv_forward" not in layer.__dict__


def rounding(layer: Any) -> tuple[torch.Tensor, str] | None:
    """(scale, format) for the norm that gives the layer what it takes; None where it is to come wide."""
    if torch.is_grad_enabled() or not is_eight_bit_convolution(layer) or not layer.rounds_x:
        return None
    return layer.x_scale, FORMATS[layer.weight.dtype]


def convolved(
    layer: EightBitConv2d,
    x: torch.Tensor | Rounded,
    add: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """layer(x) + add + residual; add: [N, C], residual: like layer(x), both of x's dtype."""
    stride, padding = layer.stride[0], int(layer.padding[0])
    if isinstance(x, Rounded):
        rounded = x
    elif not layer.rounds_x or is_differentiated(x, add, residual, layer.bias):
        # A gradient is that of a convolution with the weights as they are rounded; x is not.
        y = F.conv2d(x, layer.dequantized(x.dtype), layer.bias, stride, padding)
        y = y if add is None else y + add[:, :, None, None]
        return y if residual is None else y + residual
    else:
        q, _ = quantize_rows(x.permute(0, 2, 3, 1), FORMATS[layer.weight.dtype], layer.x_scale.view(1))
        rounded = Rounded(q.permute(0, 3, 1, 2), layer.x_scale, x.dtype)
    given = rounded.q, rounded.scale, layer.weight, layer.weight_scale, layer.bias, add, residual
    return conv2d_8bit(*given, stride, padding, str(rounded.dtype).removeprefix("torch."))
