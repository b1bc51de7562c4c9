"""The definition, in plain torch: every implementation is measured against it."""

from __future__ import annotations

import torch

from rocm_sd.ops.quantize_rows.reference import quantize_rows

__all__ = ["layer_norm_residual"]


def layer_norm_residual(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    scale: torch.Tensor | None = None,
    to: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """total = x + residual; y = layer_norm(total) * weight + bias over the last dimension; returns (y, total).

    x, residual: [..., C]; weight, bias: [C]; without a residual the total is x. The norm is that of `total` as it is
    returned, rounded to x's dtype; its arithmetic is float32, or float64 where x is. With `to` and its scale, [1], y is
    rounded once, to 8 bits.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x if residual is None else (x.to(wide) + residual.to(wide)).to(x.dtype)
    h = total.to(wide)
    for _ in range(2):
        # The second time for what rounding took from the mean: of a row of one value it would be all that is left.
        h = h - h.mean(dim=-1, keepdim=True)
    y = h / (h.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    if weight is not None:
        y = y * weight.to(wide)
    if bias is not None:
        y = y + bias.to(wide)
    return y.to(x.dtype) if to is None else quantize_rows(y, to, scale)[0], total
