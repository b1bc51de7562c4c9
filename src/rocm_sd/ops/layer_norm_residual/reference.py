"""The definition, in plain torch: every implementation is measured against it."""

from __future__ import annotations

import torch

__all__ = ["layer_norm_residual"]


def layer_norm_residual(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """total = x + residual; y = layer_norm(total) * weight + bias over the last dimension; returns (y, total).

    x, residual: [..., C]; weight, bias: [C]; without a residual the total is x. The norm is that of `total` as it is
    returned, rounded to x's dtype; its arithmetic is float32, or float64 where x is.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x if residual is None else (x.to(wide) + residual.to(wide)).to(x.dtype)
    h = total.to(wide)
    mean = h.mean(dim=-1, keepdim=True)
    variance = (h - mean).square().mean(dim=-1, keepdim=True)
    y = (h - mean) / (variance + eps).sqrt()
    if weight is not None:
        y = y * weight.to(wide)
    if bias is not None:
        y = y + bias.to(wide)
    return y.to(x.dtype), total
