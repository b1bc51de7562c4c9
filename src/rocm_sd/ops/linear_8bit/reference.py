"""The definition, in plain torch: every implementation is measured against it."""

from __future__ import annotations

import torch

__all__ = ["linear_8bit"]


def linear_8bit(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    dtype: str = "float16",
) -> torch.Tensor:
    """y = (x * x_scale) @ (weight * weight_scale).T + bias + residual.

    x: [..., K] and weight: [N, K], of 8 bits; x_scale: [...] or one for all; weight_scale: [N] or one for all; bias:
    [N]; residual, y: [..., N]. The arithmetic is float64; y is rounded once, to `dtype`.
    """
    y = x.double() @ weight.double().T
    y = y * (x_scale.double().unsqueeze(-1) if x_scale.dim() else x_scale.double()) * weight_scale.double()
    if bias is not None:
        y = y + bias.double()
    if residual is not None:
        y = y + residual.double()
    return y if any(t.dtype is torch.float64 for t in (x_scale, weight_scale)) else y.to(getattr(torch, dtype))
