"""Nearest 2x and the 3x3 convolution after it, by whichever way is fastest for the size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rocm_sd.integrations.a1111.guarding import STOCK
from rocm_sd.ops import OPS, conv2d, upsample, upsample_conv2d
from rocm_sd.ops.upsample_conv2d.workload import problem
from rocm_sd.rewrite.convolutions import takes, through_op
from rocm_sd.tuning import choice

if TYPE_CHECKING:
    import torch

__all__ = ["enlarged"]

# As in rewrite/sampling.py: below, the sums of the weights cost more than the smaller convolutions save.
_PIXELS_THAT_PAY_FOR_SUMS = 8192


def enlarged(layer: Any, x: torch.Tensor) -> Any:
    """layer(nearest 2x of x); the host's own way for large batches and pictures, and where the ops are stock torch."""
    if not through_op("upsample_conv2d", x) or not takes(layer, x) or not _keeps_size(layer):
        return STOCK
    N, _, H, W = x.shape
    if N >= 64 or not 0 < 2 * x.numel() <= 2**31:
        return STOCK
    pays = N * H * W >= _PIXELS_THAT_PAY_FOR_SUMS
    if pays and OPS["upsample_conv2d"].choose(problem(x, layer.weight), x.device).implementation != choice.STOCK:
        return upsample_conv2d(x, layer.weight, layer.bias)
    return conv2d(upsample(x), layer.weight, layer.bias, padding=1)


def _keeps_size(layer: Any) -> bool:
    return (layer.kernel_size, layer.stride, layer.padding) == ((3, 3), (1, 1), (1, 1))
