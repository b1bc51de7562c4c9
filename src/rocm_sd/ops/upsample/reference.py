"""The definition, in plain torch: every implementation is measured against it."""

from __future__ import annotations

import torch

__all__ = ["upsample"]


def upsample(x: torch.Tensor, scale: int = 2, mode: str = "nearest") -> torch.Tensor:
    """y[.., i, j] = x at ((i + 0.5) / scale - 0.5, (j + 0.5) / scale - 0.5); x: [N, C, H, W]; y is channels-last.

    Nearest takes the pixel whose square holds that place; bilinear mixes the four around it, and beyond the border the
    border's own pixels go on. The arithmetic is float32, or float64 where x is.
    """
    if mode == "nearest":
        y = x.repeat_interleave(scale, dim=2).repeat_interleave(scale, dim=3)
    else:
        y = _between(_between(x.to(torch.promote_types(x.dtype, torch.float32)), scale, 2), scale, 3).to(x.dtype)
    return y.contiguous(memory_format=torch.channels_last)


def _between(x: torch.Tensor, scale: int, dim: int) -> torch.Tensor:
    size = x.shape[dim]
    place = (torch.arange(size * scale, dtype=torch.float64, device=x.device) + 0.5) / scale - 0.5
    lower = place.floor()
    weight = (place - lower).to(x.dtype).reshape([-1 if d == dim else 1 for d in range(4)])
    below, above = (x.index_select(dim, (lower.long() + d).clamp(0, size - 1)) for d in (0, 1))
    return below * (1 - weight) + above * weight
