"""The definition, in plain torch: every implementation is measured against it."""

from __future__ import annotations

import math

import torch

from rocm_sd.ops.quantize_rows.reference import quantize_rows

__all__ = ["geglu"]


def geglu(
    x: torch.Tensor, bias: torch.Tensor | None = None, scale: torch.Tensor | None = None, to: str | None = None
) -> torch.Tensor:
    """y = h[..., :F] * gelu(h[..., F:]), h = x + bias, gelu(g) = g * Phi(g); x: [..., 2F]; bias: [2F]; y: [..., F].

    The arithmetic is float32, or float64 where x is. With `to` and its scale, [1], y is rounded once,
    to 8 bits.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide)
    if bias is not None:
        h = h + bias.to(wide)
    value, gate = h.chunk(2, dim=-1)
    # erfc of the negated argument: 1 + erf would cancel where the gate is far below 0.
    y = value * gate * 0.5 * torch.erfc(-gate / math.sqrt(2))
    return y.to(x.dtype) if to is None else quantize_rows(y, to, scale)[0]
