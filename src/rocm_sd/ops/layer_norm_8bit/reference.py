"""The definition, in plain torch: every implementation is measured against it."""

from __future__ import annotations

import torch

from rocm_sd.ops.layer_norm_residual import reference
from rocm_sd.ops.quantize_rows.reference import quantize_rows

__all__ = ["layer_norm_8bit"]


def layer_norm_8bit(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    to: str = "int8",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """total = x + residual; q * scales = layer_norm(total) * weight + bias in 8 bits; returns (q, scales, total).

    x, residual, q, total: [..., C]; scales: [...]. As `layer_norm_residual` and then `quantize_rows`, but that nothing
    is rounded between them: the norm is that of `total` in float32, or in float64 where x is.
    """
    total = x if residual is None else reference.layer_norm_residual(x, residual)[1]
    wide = total.to(torch.promote_types(x.dtype, torch.float32))
    q, scales = quantize_rows(reference.layer_norm_residual(wide, None, weight, bias, eps)[0], to)
    return q, scales, total
