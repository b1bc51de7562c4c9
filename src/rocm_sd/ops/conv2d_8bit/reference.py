"""The definition, in plain torch: every implementation is measured against it."""

from __future__ import annotations

import torch

from rocm_sd.ops.conv2d import reference

__all__ = ["conv2d_8bit"]


def conv2d_8bit(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    add: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    stride: int = 1,
    padding: int = 0,
    dtype: str = "float16",
) -> torch.Tensor:
    """y = conv2d(x * x_scale, weight * weight_scale) + bias + add + residual.

    x: [N, Cin, H, W] and weight: [Cout, Cin, k, k], of 8 bits; x_scale: one for all; weight_scale: [Cout] or one for
    all; bias: [Cout]; add: [N, Cout]; residual, y: [N, Cout, Ho, Wo]. The arithmetic is float64; y is rounded once, to
    `dtype`.
    """
    scales = weight_scale.double().view(-1, 1, 1, 1) if weight_scale.dim() else weight_scale.double()
    added = None if residual is None else residual.double()
    y = reference.conv2d(x.double() * x_scale.double(), weight.double() * scales, bias, add, added, stride, padding)
    return y if any(t.dtype is torch.float64 for t in (x_scale, weight_scale)) else y.to(getattr(torch, dtype))
