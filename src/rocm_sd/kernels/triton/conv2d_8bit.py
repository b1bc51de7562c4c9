"""y = conv2d(x, weight) * x_scale * weight_scale + bias + add + residual, x and weight in 8 bits, channels-last.

The implicit GEMM of `conv2d`, with the sums of `linear_8bit`: products of int8 are summed in int32, exactly, those of
fp8 in float32. Scales and adds are in the epilogue, and y is rounded once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from rocm_sd.kernels.sizes import ceil_div
from rocm_sd.kernels.triton.bound import Bound
from rocm_sd.kernels.triton.conv2d import add_taps, interpreted, place_pixels, place_tile, store_tile
from rocm_sd.kernels.triton.linear_8bit import imprecise, nothing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rocm_sd.kernels.configs.conv2d_8bit import Conv2d8bitConfig
    from rocm_sd.kernels.triton.bound import Part

__all__ = ["bind", "launch"]


@triton.jit
def _conv2d_8bit(
    x, x_scale, w, w_scale, bias, add, residual, y,
    H, W, Cin, Ho, Wo, Cout, pixels, tiles_m, tiles_n, blocks,
    WHOLE: tl.constexpr, BY_CHANNEL: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ADD: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    EVEN_K: tl.constexpr, ALL_INSIDE: tl.constexpr, ONE_IMAGE: tl.constexpr, IMPRECISE: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_N2: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = place_tile(tl.program_id(0), tiles_m, tiles_n, GROUP_M)
    first_m = tile_m * BLOCK_M
    image, iy, ix, taps = place_pixels(first_m, pixels, H, W, Ho, Wo, KERNEL, STRIDE, PADDING, BLOCK_M)
    # 64-bit only in the scalar base.
    first_image = first_m // (Ho * Wo)
    first_pixel = (first_image * H + (first_m - first_image * Ho * Wo) // Wo * STRIDE) * W
    pixel = ((image * H + iy) * W + ix - first_pixel) * Cin
    n = tile_n * (BLOCK_N + BLOCK_N2) + tl.arange(0, BLOCK_N)
    column = tl.minimum(n, Cout - 1)
    column2 = column
    total = nothing(WHOLE, BLOCK_M, BLOCK_N)
    total2 = total
    if BLOCK_N2:
        n2 = tile_n * (BLOCK_N + BLOCK_N2) + BLOCK_N + tl.arange(0, BLOCK_N2)
        column2 = tl.minimum(n2, Cout - 1)
        total2 = nothing(WHOLE, BLOCK_M, BLOCK_N2)
    depth = KERNEL * KERNEL * Cin
    total, total2 = add_taps(
        total, total2, x + first_pixel.to(tl.int64) * Cin, w, pixel, column * depth, column2 * depth,
        taps, 0, blocks * KERNEL * KERNEL, blocks, Cin, (W - KERNEL) * Cin,
        BLOCK_N2, BLOCK_K, KERNEL, EVEN_K, ALL_INSIDE, False, IMPRECISE,
    )  # fmt: skip
    scale = tl.load(x_scale)
    value = total.to(tl.float32) * scale
    value *= tl.load(w_scale + column * BY_CHANNEL)[None, :]
    store_tile(
        value, y, bias, add, residual, first_m, n, image, first_image, pixels, Cout,
        HAS_BIAS, HAS_ADD, HAS_RESIDUAL, ONE_IMAGE, BLOCK_M,
    )  # fmt: skip
    if BLOCK_N2:
        value = total2.to(tl.float32) * scale
        value *= tl.load(w_scale + column2 * BY_CHANNEL)[None, :]
        store_tile(
            value, y, bias, add, residual, first_m, n2, image, first_image, pixels, Cout,
            HAS_BIAS, HAS_ADD, HAS_RESIDUAL, ONE_IMAGE, BLOCK_M,
        )  # fmt: skip


def bind(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    shape: Sequence[int],
    bias: Part,
    add: Part,
    residual: Part,
    stride: int,
    padding: int,
    config: Conv2d8bitConfig,
) -> Bound:
    """bound(x, x_scale, weight, weight_scale, bias, add, residual, out) is `launch` for an `out` of that shape."""
    N, Cin, H, W = x.shape
    _, Cout, Ho, Wo = shape
    kernel, pixels = weight.shape[2], N * Ho * Wo
    tiles_m, tiles_n = ceil_div(pixels, config.block_m), ceil_div(Cout, config.block_n + config.block_n2)
    constants = {
        "WHOLE": x.dtype is torch.int8, "BY_CHANNEL": int(weight_scale.dim() > 0),
        "HAS_BIAS": bias is not None, "HAS_ADD": add is not None, "HAS_RESIDUAL": residual is not None,
        "KERNEL": kernel, "STRIDE": stride, "PADDING": padding,
        "EVEN_K": Cin % config.block_k == 0, "ALL_INSIDE": padding == 0, "ONE_IMAGE": Ho * Wo % config.block_m == 0,
        "IMPRECISE": imprecise(x, kernel * kernel * Cin, config.block_k),
        "GROUP_M": config.group_m, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_N2": config.block_n2,
        "BLOCK_K": config.block_k,
        "num_warps": config.warps, "num_stages": config.stages,
    }  # fmt: skip
    numbers = (H, W, Cin, Ho, Wo, Cout, pixels, tiles_m, tiles_n, ceil_div(Cin, config.block_k))
    return Bound(_conv2d_8bit, (tiles_m * tiles_n,), numbers, constants)


def launch(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    residual: torch.Tensor | None,
    stride: int,
    padding: int,
    config: Conv2d8bitConfig,
) -> None:
    """Fill `out`; x, weight, residual and out are dense channels-last, `add` is dense [N, Cout]."""
    if interpreted(_conv2d_8bit):
        # Triton's interpreter has no sums wider than what it multiplies; in float64 they are exact.
        x, weight = x.to(torch.float64), weight.to(torch.float64)
    bound = bind(x, weight, weight_scale, out.shape, bias, add, residual, stride, padding, config)
    bound(x, x_scale, weight, weight_scale, bias, add, residual, out)
