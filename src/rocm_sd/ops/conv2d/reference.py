"""The definition, in plain torch: every implementation is measured against it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["conv2d"]


def conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    add: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    stride: int = 1,
    padding: int = 0,
    concat: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = conv2d(x, weight) + bias + add + residual; x: [N, Cin, H, W]; weight: [Cout, Cin, k, k]; bias: [Cout].

    add: [N, Cout]; residual: like y, which is [N, Cout, Ho, Wo], channels-last; `concat` has further input channels,
    which follow x's. The arithmetic is float32, or float64 where x is.
    """
    if concat is not None:
        x = torch.cat((x, concat), 1)
    wide = torch.promote_types(x.dtype, torch.float32)
    Cout, _, kernel, _ = weight.shape
    N, _, H, W = x.shape
    Ho, Wo = ((size + 2 * padding - kernel) // stride + 1 for size in (H, W))
    columns = F.unfold(x.to(wide), kernel, padding=padding, stride=stride)
    y = (weight.to(wide).reshape(Cout, -1) @ columns).reshape(N, Cout, Ho, Wo)
    if bias is not None:
        y = y + bias.to(wide)[:, None, None]
    if add is not None:
        y = y + add.to(wide)[:, :, None, None]
    if residual is not None:
        y = y + residual.to(wide)
    return y.to(x.dtype).contiguous(memory_format=torch.channels_last)
