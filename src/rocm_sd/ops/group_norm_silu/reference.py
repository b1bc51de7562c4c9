"""The definition, in plain torch: every implementation is measured against it."""

from __future__ import annotations

import torch

from rocm_sd.ops.quantize_rows.reference import quantize_rows

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
    scale: torch.Tensor | None = None,
    to: str | None = None,
) -> torch.Tensor:
    """y = silu(group_norm(x + add)); x: [N, C, H, W]; weight, bias: [C]; add: [N, C]; y is channels-last.

    `concat` has further channels, which follow x's. The arithmetic is float32, or float64 where x is. With `to` and its
    scale, [1], y is rounded once, to 8 bits.
    """
    if concat is not None:
        x = torch.cat((x, concat), 1)
    N, C, H, W = x.shape
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide)
    if add is not None:
        h = h + add.to(wide)[:, :, None, None]
    grouped = h.reshape(N, groups, C // groups * H * W)
    for _ in range(2):
        # The second time for what rounding took from the mean: of a group of one value it would be all that is left.
        grouped = grouped - grouped.mean(dim=2, keepdim=True)
    y = (grouped / (grouped.square().mean(dim=2, keepdim=True) + eps).sqrt()).reshape(N, C, H, W)
    if weight is not None:
        y = y * weight.to(wide)[:, None, None]
    if bias is not None:
        y = y + bias.to(wide)[:, None, None]
    if silu:
        y = y * torch.sigmoid(y)
    y = y.to(x.dtype) if to is None else quantize_rows(y, to, scale)[0]
    return y.contiguous(memory_format=torch.channels_last)
