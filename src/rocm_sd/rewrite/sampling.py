"""Samplers of a UNet or VAE: nearest 2x and the convolution after it, and the convolution of stride 2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from rocm_sd.ops import OPS, conv2d, upsample, upsample_conv2d
from rocm_sd.ops.upsample_conv2d.workload import problem
from rocm_sd.rewrite import conditioning
from rocm_sd.rewrite.apply import Rule
from rocm_sd.rewrite.convolutions import (
    falls_back,
    of_diffusers,
    plain_convolution,
    takes,
    through_op,
    unusual,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DOWNSAMPLE", "UPSAMPLE", "doubles", "plain_doubled"]

# `upsample_conv2d` does 2.25 times less arithmetic with sums of the weights, which must be taken anew in every call:
# fusing a LoRA changes weights without a trace. The sums move about 1.1 kB for each pair of channels, and save
# 40 operations a pair and pixel. At the 130 to 250 operations a byte of a GPU that is even at 3600 to 7000 pixels;
# counted, not timed.
_PIXELS_THAT_PAY_FOR_SUMS = 8192


def _convolution_of(module: Any) -> Any:
    return module.conv if module.name == "conv" else module.Conv2d_0


def _upsample_why_not(module: Any) -> str | None:
    if module.norm is not None:
        return f"it begins with {type(module.norm).__name__}"
    if module.use_conv_transpose:
        return "it is a transposed convolution"
    if not module.interpolate:
        return "it does not enlarge"
    if not module.use_conv:
        return "it has no convolution"
    layer = _convolution_of(module)
    if isinstance(layer, nn.Conv2d) and not _keeps_size(layer):
        shape = f"{layer.kernel_size}, stride {layer.stride}, padding {layer.padding}"
        return f"its convolution is not 3x3 with padding 1: {shape}"
    return unusual(layer)


def _keeps_size(layer: nn.Conv2d) -> bool:
    return (layer.kernel_size, layer.stride, layer.padding) == ((3, 3), (1, 1), (1, 1))


def _upsample(self: Any, hidden_states: torch.Tensor, output_size: Any = None, *args: Any, **kwargs: Any) -> Any:
    layer = _convolution_of(self)
    deprecated = args or kwargs.get("scale") is not None
    known = not deprecated and through_op("upsample_conv2d", hidden_states) and takes(layer, hidden_states)
    if (
        not known
        or falls_back(hidden_states, layer.weight, "upsample_conv2d")
        or self.channels != hidden_states.shape[1]
        or not doubles(layer, hidden_states, output_size)
    ):
        return NotImplemented
    return plain_doubled(layer, hidden_states)


def doubles(layer: nn.Conv2d, x: torch.Tensor, size: Sequence[int] | None = None) -> bool:
    """Whether `plain_doubled` is the convolution, one that `takes`, of x enlarged to `size`, twice its own if None."""
    N, _, H, W = x.shape
    # A picture of odd size is enlarged to what the other half of a UNet had.
    if not _keeps_size(layer) or (size is not None and tuple(size) != (2 * H, 2 * W)):
        return False
    # Stock turns large batches and pictures to another layout first: torch's kernel for this one fails on them.
    return N < 64 and 0 < 2 * x.numel() <= 2**31


def plain_doubled(layer: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    """layer(nearest 2x of x) of a layer that `doubles`."""
    if _as_one_op(x, layer.weight):
        return upsample_conv2d(x, layer.weight, layer.bias, conditioning.parity_weight(layer))
    return conv2d(upsample(x), layer.weight, layer.bias, padding=1)


def _as_one_op(x: torch.Tensor, weight: torch.Tensor) -> bool:
    N, _, H, W = x.shape
    # What an op chooses cannot be asked for while it is traced.
    if N * H * W < _PIXELS_THAT_PAY_FOR_SUMS or torch.compiler.is_compiling():
        return False
    # Stock torch enlarges eight times slower than the kernel of `upsample` (397 to 46 us at 1x256x256x256 on an H200).
    return not OPS["upsample_conv2d"].choose(problem(x, weight), x.device).is_stock


def _downsample_why_not(module: Any) -> str | None:
    if module.norm is not None:
        return f"it begins with {type(module.norm).__name__}"
    if not module.use_conv:
        return "it has no convolution"
    return unusual(module.conv)


def _downsample(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    layer = self.conv
    known = (
        through_op("conv2d", hidden_states) and takes(layer, hidden_states) and hidden_states.shape[1] == self.channels
    )
    deprecated = args or kwargs.get("scale") is not None
    if deprecated or not known or falls_back(hidden_states, layer.weight, "conv2d"):
        return NotImplemented
    if self.padding == 0:
        # A VAE's encoder pads below and to the right only.
        hidden_states = F.pad(hidden_states, (0, 1, 0, 1))
    return plain_convolution(layer, hidden_states)


UPSAMPLE = Rule(
    name="upsample",
    summary="nearest 2x and the 3x3 convolution after it, in one op where that is faster",
    channels_last=True,
    of_kind=of_diffusers("Upsample2D"),
    why_not=_upsample_why_not,
    forward=_upsample,
    on_cpu=False,
)

DOWNSAMPLE = Rule(
    name="downsample",
    summary="the convolution of stride 2 by whichever implementation is fastest",
    channels_last=True,
    of_kind=of_diffusers("Downsample2D"),
    why_not=_downsample_why_not,
    forward=_downsample,
    on_cpu=False,
)
