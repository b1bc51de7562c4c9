"""The definition, in plain torch: every implementation is measured against it."""

from __future__ import annotations

import torch

from rocm_sd.ops.eight_bits import LIMITS

__all__ = ["quantize_rows"]


def quantize_rows(x: torch.Tensor, to: str, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """q = x * (limit / max|x|) of each row, rounded to the nearest of `to`, and scale = max|x| / limit; q * scale is x.

    x: [..., K]; q: [..., K]; scale: [...]. With a given `scale`, [1], it is x / scale, cut off at the limit, and the
    second result is empty. Factor and scale are float32 whatever x is: which way a value is rounded hangs on them.
    """
    limit = LIMITS[to]
    if scale is None:
        largest = x.abs().amax(dim=-1, keepdim=True).float()
        # Tensors by tensors: by a number, torch multiplies with the inverse, which is rounded once more.
        limits = torch.full_like(largest, limit)
        factor = torch.where(largest > 0, limits / largest, 0.0)
        scales = (largest / limits).squeeze(-1)
    else:
        given = scale.float()
        factor, scales = torch.ones_like(given) / given, x.new_empty(0, dtype=torch.float32)
    wide = torch.promote_types(x.dtype, torch.float32)
    q = (x.to(wide) * factor.to(wide)).clamp(-limit, limit)
    q = q.round() if to == "int8" else q.float()
    return q.to(getattr(torch, to)), scales
