"""[N, C, H, W] from contiguous to channels-last and back: each item is a matrix, and the copy is its transpose.

A tile is read along the rows of the source and written along the rows of the result, whole cache lines on both sides;
between the two, Triton passes it through LDS.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from rocm_sd.kernels.sizes import ceil_div, power_of_2

if TYPE_CHECKING:
    import torch

    from rocm_sd.kernels.configs.layout_copy import LayoutCopyConfig

__all__ = ["launch"]


@triton.jit
def _transpose(x, y, P, Q, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr):
    """y: [N, Q, P] from x: [N, P, Q], both contiguous."""
    block, n = tl.program_id(0), tl.program_id(1)
    # Neighbours read one after another along a row of the source.
    q_blocks = tl.cdiv(Q, BLOCK_Q)
    first_p, first_q = block // q_blocks * BLOCK_P, block % q_blocks * BLOCK_Q
    p, q = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_Q)
    inside = (first_p + p < P)[:, None] & (first_q + q < Q)[None, :]
    # 64-bit only in the scalar bases.
    item = n.to(tl.int64) * P * Q
    source = x + item + first_p.to(tl.int64) * Q + first_q
    result = y + item + first_q.to(tl.int64) * P + first_p
    value = tl.load(source + p[:, None] * Q + q[None, :], mask=inside)
    tl.store(result + q[None, :] * P + p[:, None], value, mask=inside)


def launch(x: torch.Tensor, out: torch.Tensor, channels_last: bool, config: LayoutCopyConfig) -> None:
    """Fill `out`: channels-last from a contiguous x, or contiguous from a channels-last x."""
    N, C, H, W = x.shape
    block_c = min(config.block_c, power_of_2(C))
    block_hw = min(config.block_hw * (config.block_c // block_c), power_of_2(H * W))
    (P, block_p), (Q, block_q) = ((C, block_c), (H * W, block_hw))[:: 1 if channels_last else -1]
    _transpose[(ceil_div(P, block_p) * ceil_div(Q, block_q), N)](
        x, out, P, Q, BLOCK_P=block_p, BLOCK_Q=block_q, num_warps=config.warps
    )
