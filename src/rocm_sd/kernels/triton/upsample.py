"""[N, C, H, W] to [N, C, s*H, s*W], channels-last, nearest or bilinear: each program owns a run of input pixels.

An input pixel is the parent of s x s output pixels, so what they share is read once, and the weights of a bilinear
output depend on its place among the s x s alone: they are constants of the compiled code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from rocm_sd.kernels.sizes import ceil_div, power_of_2
from rocm_sd.kernels.triton.bound import Bound

if TYPE_CHECKING:
    import torch

    from rocm_sd.kernels.configs.upsample import UpsampleConfig

__all__ = ["bind", "launch"]


@triton.jit
def _nearest(x, y, C, H, W, SCALE: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr):
    first, n = tl.program_id(0) * ROWS, tl.program_id(2)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    pixel = first + tl.arange(0, ROWS)
    inside = (pixel < H * W)[:, None] & (c < C)[None, :]
    # 64-bit only in the scalar bases, which stand at the first pixel of the run and at the row of its children.
    source = x + (n.to(tl.int64) * H * W + first) * C
    value = tl.load(source + tl.arange(0, ROWS)[:, None] * C + c[None, :], mask=inside)
    h0 = first // W
    result = y + (n.to(tl.int64) * H + h0) * (SCALE * SCALE * W) * C
    h, w = pixel // W - h0, pixel % W
    for i in tl.static_range(SCALE):
        for j in tl.static_range(SCALE):
            child = (h * SCALE + i) * (W * SCALE) + w * SCALE + j
            tl.store(result + child[:, None] * C + c[None, :], value, mask=inside)


@triton.jit
def _mixed(row, lower, upper, w, c, inside, C, weight):
    """One column of two neighbouring rows, mixed."""
    a = tl.load(row + (lower + w)[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
    b = tl.load(row + (upper + w)[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
    return a * (1.0 - weight) + b * weight


@triton.jit
def _bilinear(x, y, C, H, W, SCALE: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr):
    first, n = tl.program_id(0) * ROWS, tl.program_id(2)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    pixel = first + tl.arange(0, ROWS)
    inside = (pixel < H * W)[:, None] & (c < C)[None, :]
    h0 = first // W
    source = x + (n.to(tl.int64) * H + h0) * W * C
    result = y + (n.to(tl.int64) * H + h0) * (SCALE * SCALE * W) * C
    h, w = pixel // W, pixel % W
    left, right = tl.maximum(w - 1, 0), tl.minimum(w + 1, W - 1)
    for i in tl.static_range(SCALE):
        # The place of a child among its parent's neighbours: (i + 0.5) / SCALE - 0.5, from -0.5 to 0.5.
        if 2 * i + 1 < SCALE:
            lower, upper = tl.maximum(h - 1, 0), h
            down = (2 * i + 1 + SCALE) / (2 * SCALE)
        else:
            lower, upper = h, tl.minimum(h + 1, H - 1)
            down = (2 * i + 1 - SCALE) / (2 * SCALE)
        lower, upper = (lower - h0) * W, (upper - h0) * W
        middle = _mixed(source, lower, upper, w, c, inside, C, down)
        before = _mixed(source, lower, upper, left, c, inside, C, down)
        after = _mixed(source, lower, upper, right, c, inside, C, down)
        for j in tl.static_range(SCALE):
            if 2 * j + 1 < SCALE:
                across = (2 * j + 1 + SCALE) / (2 * SCALE)
                value = before * (1.0 - across) + middle * across
            else:
                across = (2 * j + 1 - SCALE) / (2 * SCALE)
                value = middle * (1.0 - across) + after * across
            child = ((h - h0) * SCALE + i) * (W * SCALE) + w * SCALE + j
            tl.store(result + child[:, None] * C + c[None, :], value.to(y.dtype.element_ty), mask=inside)


def bind(x: torch.Tensor, scale: int, mode: str, config: UpsampleConfig) -> Bound:
    """bound(x, out) is `launch` for tensors that lie as this one."""
    N, C, H, W = x.shape
    block_c = min(config.block_c, power_of_2(C))
    constants = {"SCALE": scale, "ROWS": config.rows, "BLOCK_C": block_c, "num_warps": config.warps}
    kernel = _nearest if mode == "nearest" else _bilinear
    return Bound(kernel, (ceil_div(H * W, config.rows), ceil_div(C, block_c), N), (C, H, W), constants)


def launch(x: torch.Tensor, out: torch.Tensor, scale: int, mode: str, config: UpsampleConfig) -> None:
    """Fill `out`: [N, C, scale * H, scale * W]; both are dense channels-last."""
    bind(x, scale, mode, config)(x, out)
