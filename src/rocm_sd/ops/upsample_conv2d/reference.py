"""The definition, in plain torch: every implementation is measured against it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["upsample_conv2d"]


def upsample_conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    parity_weight: torch.Tensor | None = None,  # noqa: ARG001 -- the op's own arguments; the weight says it all
) -> torch.Tensor:
    """y = conv2d(nearest 2x of x, weight, padding=1) + bias; x: [N, Cin, H, W]; weight: [Cout, Cin, 3, 3].

    bias: [Cout]; y: [N, Cout, 2H, 2W], channels-last. The arithmetic is float32, or float64 where x is.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    N, _, H, W = x.shape
    Cout = weight.shape[0]
    enlarged = x.to(wide).repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    columns = F.unfold(enlarged, 3, padding=1)
    y = (weight.to(wide).reshape(Cout, -1) @ columns).reshape(N, Cout, 2 * H, 2 * W)
    if bias is not None:
        y = y + bias.to(wide)[:, None, None]
    return y.to(x.dtype).contiguous(memory_format=torch.channels_last)
