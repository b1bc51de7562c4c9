"""The definition, in plain torch: every implementation is measured against it."""

from __future__ import annotations

import math

import torch

__all__ = ["linear_geglu"]


def linear_geglu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y = h[..., :F] * gelu(h[..., F:]), h = x @ weight.T + bias, gelu(g) = g * Phi(g).

    x: [..., K]; weight: [2F, K]; bias: [2F]; y: [..., F]. The arithmetic is float32, or float64 where x is; y is
    rounded once, to x's dtype.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide) @ weight.to(wide).T
    if bias is not None:
        h = h + bias.to(wide)
    value, gate = h.chunk(2, dim=-1)
    # erfc of the negated argument: 1 + erf would cancel where the gate is far below 0.
    return (value * gate * 0.5 * torch.erfc(-gate / math.sqrt(2))).to(x.dtype)
