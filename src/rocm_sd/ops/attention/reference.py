"""The definition, in plain torch: every implementation is measured against it."""

from __future__ import annotations

import torch

__all__ = ["attention"]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """out = softmax(scale * q k^T) v for each head; q: [B, S, H, D]; k, v: [B, T, H, D]; scale is D**-0.5 if None.

    The arithmetic is float32, or float64 where q is.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bshd,bthd->bhst", q.to(wide), k.to(wide)) * scale
    weights = torch.softmax(scores, dim=-1)
    return torch.einsum("bhst,bthd->bshd", weights, v.to(wide)).to(q.dtype).contiguous()
