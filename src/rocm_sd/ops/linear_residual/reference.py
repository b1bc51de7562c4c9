"""The definition, in plain torch: every implementation is measured against it."""

from __future__ import annotations

import torch

__all__ = ["linear_residual"]


def linear_residual(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x @ weight.T + bias + residual; x: [..., K]; weight: [N, K]; bias: [N]; residual, y: [..., N].

    The arithmetic is float32, or float64 where x is; y is rounded once, to x's dtype.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide) @ weight.to(wide).T
    if bias is not None:
        y = y + bias.to(wide)
    if residual is not None:
        y = y + residual.to(wide)
    return y.to(x.dtype)
