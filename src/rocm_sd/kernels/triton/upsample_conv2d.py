"""y = conv2d(nearest 2x of x, weight, padding=1) + bias, channels-last, with no enlarged picture in memory.

An output pixel (2i + a, 2j + b) sees 2x2 pixels of x only: rows i - 1 + a and i + a, columns likewise. For each parity
(a, b) the nine weights fall together into four sums, so the work is four convolutions of 2x2: 4/9 of the products.

`_upsample_conv2d` does all four as one implicit GEMM that writes every pixel where it belongs; `_interleave` puts the
result of a library's convolution there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from rocm_sd.kernels.sizes import ceil_div
from rocm_sd.kernels.triton.bound import Bound
from rocm_sd.kernels.triton.conv2d import interpreted, multiply_taps, place_tile

if TYPE_CHECKING:
    import torch

    from rocm_sd.kernels.configs.upsample_conv2d import UpsampleConv2dConfig

__all__ = ["bind", "interleave", "launch"]


@triton.jit
def _upsample_conv2d(
    x, w, y, bias,
    H, W, Cin, Cout, pixels, tiles_m, tiles_n, blocks,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, WIDEN: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_N2: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # The four parities of a tile read the same pixels of x, so they are neighbours, as columns of one wide matrix.
    tile_m, column = place_tile(tl.program_id(0), tiles_m, tiles_n * 4, GROUP_M)
    tile_n = column // 4
    parity = column - tile_n * 4
    a, b = parity // 2, parity % 2
    first_m = tile_m * BLOCK_M
    # Rows and channels past the end repeat the last one: what they give is not stored, and loads need no mask.
    m = tl.minimum(first_m + tl.arange(0, BLOCK_M), pixels - 1)
    line = m // W
    i = line % H
    j = m - line * W
    taps = tl.zeros([BLOCK_M], tl.int32)
    for ky in tl.static_range(2):
        for kx in tl.static_range(2):
            iy, ix = i + (a + ky - 1), j + (b + kx - 1)
            taps |= ((iy >= 0) & (iy < H) & (ix >= 0) & (ix < W)).to(tl.int32) << (ky * 2 + kx)
    n = tile_n * (BLOCK_N + BLOCK_N2) + tl.arange(0, BLOCK_N)
    n2 = n
    if BLOCK_N2:
        n2 = tile_n * (BLOCK_N + BLOCK_N2) + BLOCK_N + tl.arange(0, BLOCK_N2)
    # 64-bit only in the scalar base: maps of 1024x1024 with a batch of 8 pass 2^31 elements.
    value, value2 = multiply_taps(
        x + first_m.to(tl.int64) * Cin, w + parity * Cout * 4 * Cin, (m - first_m + (a - 1) * W + b - 1) * Cin,
        tl.minimum(n, Cout - 1) * (4 * Cin), tl.minimum(n2, Cout - 1) * (4 * Cin),
        taps, 0, blocks * 4, blocks, Cin, (W - 2) * Cin,
        BLOCK_M, BLOCK_N, BLOCK_N2, BLOCK_K, 2, EVEN_K, False, WIDEN,
    )  # fmt: skip
    # Line `line` of x becomes lines 2 * line and 2 * line + 1 of y, also from one picture of the batch to the next.
    first_line = first_m // W
    target = ((line - first_line) * 4 * W + j * 2) * Cout
    y += (first_line * 2 + a).to(tl.int64) * (W * 2 * Cout) + b * Cout
    is_pixel = first_m + tl.arange(0, BLOCK_M) < pixels
    _store(value, y, bias, target, n, is_pixel, Cout, HAS_BIAS)
    if BLOCK_N2:
        _store(value2, y, bias, target, n2, is_pixel, Cout, HAS_BIAS)


@triton.jit
def _store(value, y, bias, target, n, is_pixel, Cout, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        value += tl.load(bias + n, mask=n < Cout, other=0.0).to(tl.float32)[None, :]
    stored = is_pixel[:, None] & (n < Cout)[None, :]
    tl.store(y + target[:, None] + n[None, :], value.to(y.dtype.element_ty), mask=stored)


@triton.jit
def _interleave(
    parts, y, bias, H, W, C, a, column_blocks,
    HAS_BIAS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """y[2i + a, 2j + b] = parts[i + a, j + b, of parity b] + bias, of one parity a; parts: [N, H + 1, W + 1, 2, C]."""
    number, c_block = tl.program_id(0), tl.program_id(1)
    line = number // column_blocks
    image = line // H
    i = line - image * H
    ox = (number - line * column_blocks) * COLUMNS + tl.arange(0, COLUMNS)
    c = c_block * BLOCK_C + tl.arange(0, BLOCK_C)
    b = ox % 2
    inside = (ox < 2 * W)[:, None] & (c < C)[None, :]
    source = (image * (H + 1) + i + a).to(tl.int64) * (W + 1) * 2 * C
    column = (ox // 2 + b) * 2 * C + b * C
    value = tl.load(parts + source + column[:, None] + c[None, :], mask=inside, other=0.0)
    if HAS_BIAS:
        shift = tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        value = (value.to(tl.float32) + shift).to(y.dtype.element_ty)
    base = (line * 2 + a).to(tl.int64) * 2 * W * C
    tl.store(y + base + ox[:, None] * C + c[None, :], value, mask=inside)


def interleave(parts: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, a: int) -> None:
    """Fill the lines of parity a of `out`, [N, C, 2H, 2W]; `parts`: [N, 2 * C, H + 1, W + 1]; dense channels-last."""
    N, C, H, W = out.shape
    # 2048 values in 4 warps: two 16-byte loads a thread.
    columns, block_c = (16, 128) if C % 128 == 0 else (32, 64)
    column_blocks = ceil_div(W, columns)
    # Lines on the first axis: the others hold 65535 at most.
    _interleave[(N * (H // 2) * column_blocks, ceil_div(C, block_c))](
        parts, out, bias, H // 2, W // 2, C, a, column_blocks,
        HAS_BIAS=bias is not None, COLUMNS=columns, BLOCK_C=block_c, num_warps=4,
    )  # fmt: skip


def bind(
    x: torch.Tensor, parity_weight: torch.Tensor, bias: torch.Tensor | None, config: UpsampleConv2dConfig
) -> Bound:
    """bound(x, parity_weight, out, bias) is `launch` for tensors that lie as these."""
    N, Cin, H, W = x.shape
    Cout = parity_weight.shape[1]
    pixels = N * H * W
    tiles_m, tiles_n = ceil_div(pixels, config.block_m), ceil_div(Cout, config.block_n + config.block_n2)
    constants = {
        "HAS_BIAS": bias is not None, "EVEN_K": Cin % config.block_k == 0, "WIDEN": interpreted(_upsample_conv2d),
        "GROUP_M": config.group_m, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_N2": config.block_n2,
        "BLOCK_K": config.block_k,
        "num_warps": config.warps, "num_stages": config.stages,
    }  # fmt: skip
    numbers = (H, W, Cin, Cout, pixels, tiles_m, tiles_n, ceil_div(Cin, config.block_k))
    return Bound(_upsample_conv2d, (tiles_m * tiles_n * 4,), numbers, constants)


def launch(
    x: torch.Tensor,
    parity_weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    config: UpsampleConv2dConfig,
) -> None:
    """Fill `out`, [N, Cout, 2H, 2W]; x and out are dense channels-last, parity_weight is dense [4, Cout, 2, 2, Cin]."""
    bind(x, parity_weight, bias, config)(x, parity_weight, out, bias)
