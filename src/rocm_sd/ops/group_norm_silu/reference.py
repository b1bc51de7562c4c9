"""The definition, in plain torch: every implementation is measured against it."""

from __future__ import annotations

import torch

__all__ = ["group_norm_silu"]


def group_norm_silu(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    add: torch.Tensor | None = None,
    eps: float = 1e-5,
    silu: bool = True,
    concat: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = silu(group_norm(x + add)); x: [N, C, H, W]; weight, bias: [C]; add: [N, C]; y is channels-last.

    `concat` has further channels, which follow x's. The arithmetic is float32, or float64 where x is.
    """
    if concat is not None:
        x = torch.cat((x, concat), 1)
    N, C, H, W = x.shape
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide)
    if add is not None:
        h = h + add.to(wide)[:, :, None, None]
    grouped = h.reshape(N, groups, C // groups * H * W)
    mean = grouped.mean(dim=2, keepdim=True)
    variance = (grouped - mean).square().mean(dim=2, keepdim=True)
    y = ((grouped - mean) / (variance + eps).sqrt()).reshape(N, C, H, W)
    if weight is not None:
        y = y * weight.to(wide)[:, None, None]
    if bias is not None:
        y = y + bias.to(wide)[:, None, None]
    if silu:
        y = y * torch.sigmoid(y)
    return y.to(x.dtype).contiguous(memory_format=torch.channels_last)
