"""y = conv2d(x, weight) + bias + add + residual, channels-last, as an implicit GEMM: pixels by channels by taps.

A row of the left matrix is one output pixel, a column of the right one is an output channel, and the depth runs over
the taps of the filter and, within a tap, over blocks of input channels. Which taps of a pixel lie inside the picture
is worked out once, as one bit for each tap, so that the loop has no division and no comparison of coordinates.

Input channels that lie in two tensors are two depths, of which the second goes on with the first one's sums.

With `split_k` the depth is cut into parts whose sums go to memory as float32, and `_finish` adds them up in their
order: maps of 8x8 and 16x16 have too few tiles to fill a large GPU. No atomics: the same input gives the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from rocm_sd.kernels.sizes import ceil_div
from rocm_sd.kernels.triton.bound import Bound

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rocm_sd.kernels.configs.conv2d import Conv2dConfig
    from rocm_sd.kernels.triton.bound import Part

__all__ = [
    "add_taps", "bind", "bind_finish", "finish", "interpreted", "launch", "multiply_taps", "place_pixels", "place_tile",
    "store_tile",
]  # fmt: skip


@triton.jit
def place_tile(number, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(row, column) of a tile, in an order in which neighbours share weights and then pixels."""
    per_group = GROUP_M * tiles_n
    group = number // per_group
    within = number - group * per_group
    rows = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    column = within // rows
    return group * GROUP_M + within - column * rows, column


@triton.jit
def place_pixels(
    first_m, pixels, H, W, Ho, Wo,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Of each row of a tile: its picture, where its first tap lies, and a bit for each tap that lies in the picture."""
    # Rows and channels past the end repeat the last one: what they give is not stored, and loads need no mask.
    m = tl.minimum(first_m + tl.arange(0, BLOCK_M), pixels - 1)
    image = m // (Ho * Wo)
    within = m - image * (Ho * Wo)
    oy = within // Wo
    iy = oy * STRIDE - PADDING
    ix = (within - oy * Wo) * STRIDE - PADDING
    taps = tl.zeros([BLOCK_M], tl.int32)
    for ky in tl.static_range(KERNEL):
        for kx in tl.static_range(KERNEL):
            inside = (iy + ky >= 0) & (iy + ky < H) & (ix + kx >= 0) & (ix + kx < W)
            taps |= inside.to(tl.int32) << (ky * KERNEL + kx)
    return image, iy, ix, taps


@triton.jit
def multiply_taps(
    x, w, pixel, channel, channel2, taps, first, count, blocks, Cin, row_skip,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_N2: tl.constexpr, BLOCK_K: tl.constexpr,
    KW: tl.constexpr, EVEN_K: tl.constexpr, ALL_INSIDE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """`add_taps` to nothing."""
    sum_ = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    sum2 = sum_
    if BLOCK_N2:
        sum2 = tl.zeros([BLOCK_M, BLOCK_N2], tl.float32)
    return add_taps(
        sum_, sum2, x, w, pixel, channel, channel2, taps, first, count, blocks, Cin, row_skip,
        BLOCK_N2, BLOCK_K, KW, EVEN_K, ALL_INSIDE, WIDEN,
    )  # fmt: skip


@triton.jit
def add_taps(
    sum_, sum2, x, w, pixel, channel, channel2, taps, first, count, blocks, Cin, row_skip,
    BLOCK_N2: tl.constexpr, BLOCK_K: tl.constexpr,
    KW: tl.constexpr, EVEN_K: tl.constexpr, ALL_INSIDE: tl.constexpr, WIDEN: tl.constexpr,
    IMPRECISE: tl.constexpr = None,
):  # fmt: skip
    """Sums over `count` blocks of the depth from number `first` on, added to those given, which are float32 or int32.

    `sum_`: [BLOCK_M, BLOCK_N]; `sum2`: [BLOCK_M, BLOCK_N2] where there is one;
    `pixel`, `channel`, `channel2`: where the rows of x and of w begin; `taps`: a bit for each tap that lies inside the
    picture; `blocks`: blocks of channels in a tap; `row_skip`: from the end of a filter row in x to the next one's
    beginning.
    """
    lane = tl.arange(0, BLOCK_K)
    x_tile = pixel[:, None] + lane[None, :]
    w_tile = channel[None, :] + lane[:, None]
    if BLOCK_N2:
        w_tile2 = channel2[None, :] + lane[:, None]
    tap = first // blocks
    c = (first - tap * blocks) * BLOCK_K
    for _ in range(count):
        at_w = tap * Cin + c
        # The next pixel's channels follow this one's in memory, so a filter row is one run of KW * Cin values.
        at_x = at_w + tap // KW * row_skip
        in_depth = lane < Cin - c
        if EVEN_K:
            at_w = tl.multiple_of(at_w, 16)
            at_x = tl.multiple_of(at_x, 16)
            if ALL_INSIDE:
                a = tl.load(x + at_x + x_tile)
            else:
                a = tl.load(x + at_x + x_tile, mask=((taps >> tap) & 1 != 0)[:, None], other=0.0)
        else:
            a = tl.load(x + at_x + x_tile, mask=((taps >> tap) & 1 != 0)[:, None] & in_depth[None, :], other=0.0)
        if WIDEN:
            a = a.to(tl.float32)
        b = _weights(w + at_w + w_tile, in_depth, EVEN_K, WIDEN)
        sum_ = tl.dot(a, b, sum_, max_num_imprecise_acc=IMPRECISE, out_dtype=sum_.dtype)
        if BLOCK_N2:
            b = _weights(w + at_w + w_tile2, in_depth, EVEN_K, WIDEN)
            sum2 = tl.dot(a, b, sum2, max_num_imprecise_acc=IMPRECISE, out_dtype=sum2.dtype)
        c += BLOCK_K
        tap_done = c >= Cin
        c = tl.where(tap_done, 0, c)
        tap = tl.where(tap_done, tap + 1, tap)
    return sum_, sum2


@triton.jit
def _weights(at, in_depth, EVEN_K: tl.constexpr, WIDEN: tl.constexpr):
    b = tl.load(at) if EVEN_K else tl.load(at, mask=in_depth[:, None], other=0.0)
    if WIDEN:
        b = b.to(tl.float32)
    return b


@triton.jit
def _conv2d(
    x, w, y, bias, add, residual, concat,
    H, W, Cin, Ho, Wo, Cout, pixels, tiles_m, tiles_n, blocks, blocks_per_split, Cconcat,
    HAS_BIAS: tl.constexpr, HAS_ADD: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_CONCAT: tl.constexpr,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    EVEN_K: tl.constexpr, ALL_INSIDE: tl.constexpr, ONE_IMAGE: tl.constexpr,
    WIDEN: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_N2: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = place_tile(tl.program_id(0), tiles_m, tiles_n, GROUP_M)
    first_m = tile_m * BLOCK_M
    image, iy, ix, taps = place_pixels(first_m, pixels, H, W, Ho, Wo, KERNEL, STRIDE, PADDING, BLOCK_M)
    # 64-bit only in the scalar base: maps of 1024x1024 with a batch of 8 pass 2^31 elements.
    first_image = first_m // (Ho * Wo)
    first_pixel = (first_image * H + (first_m - first_image * Ho * Wo) // Wo * STRIDE) * W
    pixel = ((image * H + iy) * W + ix - first_pixel) * Cin
    n = tile_n * (BLOCK_N + BLOCK_N2) + tl.arange(0, BLOCK_N)
    n2 = n
    if BLOCK_N2:
        n2 = tile_n * (BLOCK_N + BLOCK_N2) + BLOCK_N + tl.arange(0, BLOCK_N2)
    depth = KERNEL * KERNEL * Cin
    if HAS_CONCAT:
        depth = Cin + Cconcat
    channel, channel2 = tl.minimum(n, Cout - 1) * depth, tl.minimum(n2, Cout - 1) * depth

    first_block = tl.program_id(1) * blocks_per_split
    count = tl.minimum(blocks_per_split, blocks * KERNEL * KERNEL - first_block)
    value, value2 = multiply_taps(
        x + first_pixel.to(tl.int64) * Cin, w, pixel, channel, channel2,
        taps, first_block, count, blocks, Cin, (W - KERNEL) * Cin,
        BLOCK_M, BLOCK_N, BLOCK_N2, BLOCK_K, KERNEL, EVEN_K, ALL_INSIDE, WIDEN,
    )  # fmt: skip
    if HAS_CONCAT:
        # A kernel of 1x1 alone: with more taps the two tensors' channels would take turns in a row of w.
        more = (Cconcat + BLOCK_K - 1) // BLOCK_K
        value, value2 = add_taps(
            value, value2, concat + first_pixel.to(tl.int64) * Cconcat, w + Cin,
            ((image * H + iy) * W + ix - first_pixel) * Cconcat, channel, channel2, taps, 0, more, more, Cconcat, 0,
            BLOCK_N2, BLOCK_K, KERNEL, EVEN_K, ALL_INSIDE, WIDEN,
        )  # fmt: skip
    y += tl.program_id(1).to(tl.int64) * pixels * Cout
    store_tile(
        value, y, bias, add, residual, first_m, n, image, first_image, pixels, Cout,
        HAS_BIAS, HAS_ADD, HAS_RESIDUAL, ONE_IMAGE, BLOCK_M,
    )  # fmt: skip
    if BLOCK_N2:
        store_tile(
            value2, y, bias, add, residual, first_m, n2, image, first_image, pixels, Cout,
            HAS_BIAS, HAS_ADD, HAS_RESIDUAL, ONE_IMAGE, BLOCK_M,
        )  # fmt: skip


@triton.jit
def store_tile(
    value, y, bias, add, residual, first_m, n, image, first_image, pixels, Cout,
    HAS_BIAS: tl.constexpr, HAS_ADD: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ONE_IMAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, BLOCK_M)
    out = row[:, None] * Cout + n[None, :]
    stored = (first_m + row < pixels)[:, None] & (n < Cout)[None, :]
    base = first_m.to(tl.int64) * Cout
    if HAS_BIAS:
        value += tl.load(bias + n, mask=n < Cout, other=0.0).to(tl.float32)[None, :]
    if HAS_ADD:
        if ONE_IMAGE:
            value += tl.load(add + first_image * Cout + n, mask=n < Cout, other=0.0).to(tl.float32)[None, :]
        else:
            value += tl.load(add + image[:, None] * Cout + n[None, :], mask=stored, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + base + out, mask=stored, other=0.0).to(tl.float32)
    tl.store(y + base + out, value.to(y.dtype.element_ty), mask=stored)


@triton.jit
def _finish(
    source, y, bias, add, residual, HW, C,
    HAS_BIAS: tl.constexpr, HAS_ADD: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """y = sum of the splits + bias + add + residual; source may be y itself."""
    row_block, c_block, image = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = row_block * ROWS + tl.arange(0, ROWS)
    c = c_block * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (row < HW)[:, None] & (c < C)[None, :]
    base = (image.to(tl.int64) * HW + row_block * ROWS) * C
    tile = tl.arange(0, ROWS)[:, None] * C + c[None, :]
    value = tl.load(source + base + tile, mask=inside, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        part = ((split * tl.num_programs(2) + image).to(tl.int64) * HW + row_block * ROWS) * C
        value += tl.load(source + part + tile, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    if HAS_ADD:
        value += tl.load(add + image * C + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        value += tl.load(residual + base + tile, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + base + tile, value.to(y.dtype.element_ty), mask=inside)


def interpreted(kernel: object) -> bool:
    """Triton's interpreter multiplies bfloat16 matrices as if their bits were integers: it is given float32."""
    return isinstance(kernel, InterpretedFunction)


def bind_finish(shape: Sequence[int], bias: Part, add: Part, residual: Part, splits: int = 1) -> Bound:
    """bound(source, out, bias, add, residual) is `finish` for an `out` of that shape and parts like these."""
    N, C, H, W = shape
    # 2048 values in 4 warps: one 16-byte load of half precision a thread of a wave of 64, two of a wave of 32.
    rows, block_c = (16, 128) if C % 128 == 0 else (32, 64)
    constants = {
        "HAS_BIAS": bias is not None, "HAS_ADD": add is not None, "HAS_RESIDUAL": residual is not None,
        "SPLITS": splits, "ROWS": rows, "BLOCK_C": block_c, "num_warps": 4,
    }  # fmt: skip
    return Bound(_finish, (ceil_div(H * W, rows), ceil_div(C, block_c), N), (H * W, C), constants)


def finish(
    source: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    residual: torch.Tensor | None,
    splits: int = 1,
) -> None:
    """out = sum of the splits of `source` + bias + add + residual; all dense channels-last, `source` may be `out`."""
    bind_finish(out.shape, bias, add, residual, splits)(source, out, bias, add, residual)


def bind(
    x: torch.Tensor,
    weight: torch.Tensor,
    shape: Sequence[int],
    bias: Part,
    add: Part,
    residual: Part,
    stride: int,
    padding: int,
    config: Conv2dConfig,
    concat: Part = None,
) -> Callable[..., None]:
    """bound(x, weight, out, bias, add, residual, concat) is `launch` for such tensors and an `out` of that shape."""
    N, Cin, H, W = x.shape
    more = 0 if concat is None else concat.shape[1]
    _, Cout, Ho, Wo = shape
    kernel = weight.shape[2]
    pixels = N * Ho * Wo
    tiles_m, tiles_n = ceil_div(pixels, config.block_m), ceil_div(Cout, config.block_n + config.block_n2)
    blocks = ceil_div(Cin, config.block_k)
    # Every part must have work: of 9 blocks in 4 parts of 3, the fourth would have none.
    blocks_per_split = ceil_div(blocks * kernel * kernel, config.split_k)
    splits = ceil_div(blocks * kernel * kernel, blocks_per_split)
    fused = splits == 1
    constants = {
        "HAS_BIAS": fused and bias is not None, "HAS_ADD": fused and add is not None,
        "HAS_RESIDUAL": fused and residual is not None, "HAS_CONCAT": concat is not None,
        "KERNEL": kernel, "STRIDE": stride, "PADDING": padding,
        "EVEN_K": Cin % config.block_k == more % config.block_k == 0, "ALL_INSIDE": padding == 0,
        "ONE_IMAGE": Ho * Wo % config.block_m == 0, "WIDEN": interpreted(_conv2d),
        "GROUP_M": config.group_m, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_N2": config.block_n2,
        "BLOCK_K": config.block_k,
        "num_warps": config.warps, "num_stages": config.stages,
    }  # fmt: skip
    numbers = (H, W, Cin, Ho, Wo, Cout, pixels, tiles_m, tiles_n, blocks, blocks_per_split, more)
    product = Bound(_conv2d, (tiles_m * tiles_n, splits), numbers, constants)
    if fused:
        return product
    finishing = bind_finish(shape, bias, add, residual, splits)

    def in_parts(
        x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: Part, add: Part, residual: Part, concat: Part
    ) -> None:
        parts = x.new_empty((splits, pixels, Cout), dtype=torch.float32)
        product(x, weight, parts, bias, add, residual, concat)
        finishing(parts, out, bias, add, residual)

    return in_parts


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    residual: torch.Tensor | None,
    stride: int,
    padding: int,
    config: Conv2dConfig,
    concat: torch.Tensor | None = None,
) -> None:
    """Fill `out`; x, concat, weight, residual and out are dense channels-last, `add` is dense [N, Cout].

    `concat` has the input channels that follow x's, where the config `reads_two`.
    """
    bound = bind(x, weight, out.shape, bias, add, residual, stride, padding, config, concat)
    bound(x, weight, out, bias, add, residual, concat)
