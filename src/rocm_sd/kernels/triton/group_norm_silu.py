"""y = silu(group_norm(x + add)), x: [N, C, H, W] channels-last.

Where a group fits the registers of one workgroup, `_whole` does it in one pass over x. Else there are two passes:
1. `_moments` gives mean and sum of squared differences of each channel over a slice of rows (Welford: no cancellation).
2. `_fold` merges the slices and the channels of a group into one mean and one scale per channel.
3. `_apply` writes silu((x + add - mean) * scale + bias): the difference first, since a spread far below the mean
   would drown in the rounding of x * scale + shift.

A per-channel `add` moves a channel's mean and leaves its spread alone, so `_moments` need not read it.
Channels that lie in two tensors are gone over one tensor after the other; only `_fold` sees groups.
No atomics: the same input gives the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from rocm_sd.kernels.sizes import ceil_div, power_of_2
from rocm_sd.kernels.triton.bound import Bound
from rocm_sd.kernels.triton.quantize_rows import eight_bits_of, in_eight_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rocm_sd.kernels.configs.group_norm_silu import GroupNormSiluConfig
    from rocm_sd.kernels.triton.bound import Part, Piece

__all__ = ["bind", "launch"]


@triton.jit
def _whole(
    x, y, weight, bias, add, step, HW, eps,
    WIDTH: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ADD: tl.constexpr, SILU: tl.constexpr,
    LIMIT: tl.constexpr, ROWS: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    g, n = tl.program_id(0), tl.program_id(1)
    C = tl.num_programs(0) * WIDTH
    lane = tl.arange(0, BLOCK_G)
    row = tl.arange(0, ROWS)
    in_group = lane < WIDTH
    c = g * WIDTH + lane
    inside = (row < HW)[:, None] & in_group[None, :]
    at = n.to(tl.int64) * HW * C
    tile = row[:, None] * C + c[None, :]
    value = tl.load(x + at + tile, mask=inside, other=0.0).to(tl.float32)
    if HAS_ADD:
        value += tl.load(add + n * C + c, mask=in_group, other=0.0).to(tl.float32)[None, :]
    elements = 1.0 * (HW * WIDTH)
    # Halves of one value have an exact sum, and then their mean is that value. Other sums are rounded: in a group of
    # one value that would be all of the result, so it is taken off again.
    value = tl.where(inside, value - tl.div_rn(tl.sum(tl.where(inside, value, 0.0)), elements), 0.0)
    if HAS_ADD or x.dtype.element_ty == tl.float32:
        value = tl.where(inside, value - tl.div_rn(tl.sum(value), elements), 0.0)
    variance = tl.sum(value * value) / elements
    scale = tl.zeros([BLOCK_G], tl.float32) + 1.0 / tl.sqrt(variance + eps)
    if HAS_WEIGHT:
        scale *= tl.load(weight + c, mask=in_group, other=0.0).to(tl.float32)
    value *= scale[None, :]
    if HAS_BIAS:
        value += tl.load(bias + c, mask=in_group, other=0.0).to(tl.float32)[None, :]
    if SILU:
        value = value / (1.0 + tl.exp(-value))
    if LIMIT:
        value = in_eight_bits(value, tl.div_rn(1.0, tl.load(step)), LIMIT, LIMIT == 127)
    tl.store(y + at + tile, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _moments(x, means, m2s, C, all_C, HW, rows_per_slice, ROWS: tl.constexpr, BLOCK_C: tl.constexpr):
    """`all_C`: channels of the norm, of which x may have only some."""
    slice_id, c_block, n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = slice_id * rows_per_slice
    last = tl.minimum(first + rows_per_slice, HW)
    c = c_block * BLOCK_C + tl.arange(0, BLOCK_C)
    row = tl.arange(0, ROWS)
    # 64-bit only in the scalar base: a 1024x1024 map with a batch of 8 passes 2^31 elements.
    base = x + (n.to(tl.int64) * HW + first) * C
    tile = row[:, None] * C + c[None, :]
    mean = tl.zeros([ROWS, BLOCK_C], tl.float32)
    m2 = tl.zeros([ROWS, BLOCK_C], tl.float32)
    # Each element of the tile keeps its own running mean, so threads meet only once, after the loop.
    seen = 0.0
    for start in range(first, last, ROWS):
        inside = (start + row < last)[:, None] & (c < C)[None, :]
        value = tl.load(base + tile, mask=inside, other=0.0).to(tl.float32)
        seen += 1.0
        delta = tl.where(inside, value - mean, 0.0)
        mean += delta * (1.0 / seen)
        m2 += delta * (value - mean)
        base += ROWS * C
    # Rows of a partial last tile have seen one value fewer, or none.
    count = tl.maximum(last - first - row + ROWS - 1, 0) // ROWS
    weight = count.to(tl.float32)[:, None]
    total = (last - first).to(tl.float32)
    channel_mean = tl.div_rn(tl.sum(mean * weight, axis=0), total)
    distance = mean - channel_mean[None, :]
    if x.dtype.element_ty == tl.float32:
        # As in `_whole`.
        shift = tl.div_rn(tl.sum(distance * weight, axis=0), total)
        channel_mean += shift
        distance -= shift[None, :]
    channel_m2 = tl.sum(m2 + distance * distance * weight, axis=0)
    out = (n * tl.num_programs(0) + slice_id) * all_C + c
    tl.store(means + out, channel_mean, mask=c < C)
    tl.store(m2s + out, channel_m2, mask=c < C)


@triton.jit
def _fold(
    means, m2s, weight, add, group_means, scales,
    C, HW, groups, slices, rows_per_slice, eps,
    HAS_WEIGHT: tl.constexpr, HAS_ADD: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    g, n = tl.program_id(0), tl.program_id(1)
    width = C // groups
    lane = tl.arange(0, BLOCK_G)
    in_group = lane < width
    c = g * width + lane
    extra = tl.zeros([BLOCK_G], tl.float32)
    if HAS_ADD:
        extra = tl.load(add + n * C + c, mask=in_group, other=0.0).to(tl.float32)
    s = tl.arange(0, BLOCK_S)
    elements = (width * HW).to(tl.float32)

    total = tl.zeros([BLOCK_S, BLOCK_G], tl.float32)
    for start in range(0, slices, BLOCK_S):
        slice_id = start + s
        inside = (slice_id < slices)[:, None] & in_group[None, :]
        at = (n * slices + slice_id)[:, None] * C + c[None, :]
        count = tl.maximum(tl.minimum(rows_per_slice, HW - slice_id * rows_per_slice), 0).to(tl.float32)[:, None]
        mean = tl.load(means + at, mask=inside, other=0.0) + extra[None, :]
        total += tl.where(inside, mean * count, 0.0)
    group_mean = tl.div_rn(tl.sum(tl.sum(total, axis=1), axis=0), elements)

    spread = tl.zeros([BLOCK_S, BLOCK_G], tl.float32)
    left = tl.zeros([BLOCK_S, BLOCK_G], tl.float32)
    for start in range(0, slices, BLOCK_S):
        slice_id = start + s
        inside = (slice_id < slices)[:, None] & in_group[None, :]
        at = (n * slices + slice_id)[:, None] * C + c[None, :]
        count = tl.maximum(tl.minimum(rows_per_slice, HW - slice_id * rows_per_slice), 0).to(tl.float32)[:, None]
        distance = tl.load(means + at, mask=inside, other=0.0) + extra[None, :] - group_mean
        m2 = tl.load(m2s + at, mask=inside, other=0.0)
        spread += tl.where(inside, m2 + distance * distance * count, 0.0)
        left += tl.where(inside, distance * count, 0.0)
    # As in `_whole`; the spread about the mean is that about the first one, less the square of what lies between them.
    shift = tl.div_rn(tl.sum(tl.sum(left, axis=1), axis=0), elements)
    group_mean += shift
    variance = tl.maximum(tl.sum(tl.sum(spread, axis=1), axis=0) / elements - shift * shift, 0.0)
    rstd = 1.0 / tl.sqrt(variance + eps)

    scale = tl.zeros([BLOCK_G], tl.float32) + rstd
    if HAS_WEIGHT:
        scale *= tl.load(weight + c, mask=in_group, other=0.0).to(tl.float32)
    tl.store(group_means + n * C + c, group_mean, mask=in_group)
    tl.store(scales + n * C + c, scale, mask=in_group)


@triton.jit
def _apply(
    x, y, group_means, scales, bias, add, step, C, all_C, HW,
    HAS_BIAS: tl.constexpr, HAS_ADD: tl.constexpr, SILU: tl.constexpr, LIMIT: tl.constexpr, PART: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """PART: x has only C of the `all_C` channels of y; otherwise both lie alike, and one address serves both."""
    # Backwards: what `_moments` read last is still in the cache.
    row_block = tl.num_programs(0) - 1 - tl.program_id(0)
    c_block, n = tl.program_id(1), tl.program_id(2)
    c = c_block * BLOCK_C + tl.arange(0, BLOCK_C)
    row = row_block * ROWS + tl.arange(0, ROWS)
    mean = tl.load(group_means + n * all_C + c, mask=c < C, other=0.0)
    scale = tl.load(scales + n * all_C + c, mask=c < C, other=0.0)
    base = (n.to(tl.int64) * HW + row_block * ROWS) * C
    tile = tl.arange(0, ROWS)[:, None] * C + c[None, :]
    inside = (row < HW)[:, None] & (c < C)[None, :]
    value = tl.load(x + base + tile, mask=inside, other=0.0).to(tl.float32)
    if HAS_ADD:
        value += tl.load(add + n * all_C + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    value = (value - mean[None, :]) * scale[None, :]
    if HAS_BIAS:
        value += tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    if SILU:
        value = value / (1.0 + tl.exp(-value))
    if LIMIT:
        value = in_eight_bits(value, tl.div_rn(1.0, tl.load(step)), LIMIT, LIMIT == 127)
    if PART:
        base = (n.to(tl.int64) * HW + row_block * ROWS) * all_C
        tile = tl.arange(0, ROWS)[:, None] * all_C + c[None, :]
    tl.store(y + base + tile, value.to(y.dtype.element_ty), mask=inside)


def bind(
    parts: Sequence[torch.Tensor],
    groups: int,
    weight: Part,
    bias: Part,
    add: Part,
    eps: float,
    silu: bool,
    limit: int,
    config: GroupNormSiluConfig,
    compute_units: int,
) -> Callable[..., None]:
    """bound(parts, out, weight, bias, add, step) is `launch` for tensors that lie as these."""
    N, _, H, W = parts[0].shape
    C = sum(x.shape[1] for x in parts)
    HW, width = H * W, C // groups
    given = {"HAS_BIAS": bias is not None, "HAS_ADD": add is not None, "SILU": silu, "LIMIT": limit}
    block_g = power_of_2(width)
    if config.one_pass(HW, width):
        rows = power_of_2(HW)
        # A lane for every element: where waves hold copies, their sums can differ in the last bit, and either is kept.
        warps = max(1, min(config.whole_warps, rows * block_g // 64))
        constants = {
            "WIDTH": width, "HAS_WEIGHT": weight is not None, **given,
            "ROWS": rows, "BLOCK_G": block_g, "num_warps": warps,
        }  # fmt: skip
        whole = Bound(_whole, (groups, N), (HW, eps), constants)

        def in_one_pass(
            parts: Sequence[torch.Tensor], out: torch.Tensor, weight: Part, bias: Part, add: Part, step: Part
        ) -> None:
            whole(parts[0], out, weight, bias, add, step)

        return in_one_pass

    wanted = max(1, compute_units * config.slices_per_cu // (N * ceil_div(C, config.moments_channels)))
    rows_per_slice = max(config.moments_rows, ceil_div(HW, wanted))
    slices = ceil_div(HW, rows_per_slice)
    # 64 x 128 partial sums in 4 warps spill 20 registers on gfx1100; 2048 need 16 a thread.
    block_s = min(power_of_2(slices), max(1, 2048 // block_g))
    # Means and sums of squares of each slice, then means and scales of each channel, each at a multiple of 16 bytes.
    by_slice, by_channel = ceil_div(N * slices * C, 4) * 4, ceil_div(N * C, 4) * 4
    at_m2s, at_means, at_scales = by_slice, 2 * by_slice, 2 * by_slice + by_channel

    def of_slices(start: int, first: int = 0) -> Piece:
        return start + first, N * slices * C - first

    def of_channels(start: int, first: int = 0) -> Piece:
        return start + first, N * C - first

    def from_(first: int, size: int) -> Piece:
        return (first, size - first) if first else None

    moments, applied = [], []
    for x, first in _channels(parts):
        own = x.shape[1]
        moments.append(
            Bound(
                _moments,
                (slices, ceil_div(own, config.moments_channels), N),
                (own, C, HW, rows_per_slice),
                {"ROWS": config.moments_rows, "BLOCK_C": config.moments_channels, "num_warps": config.moments_warps},
                (None, of_slices(0, first), of_slices(at_m2s, first)),
            )
        )
        constants = {
            **given, "PART": len(parts) > 1,
            "ROWS": config.apply_rows, "BLOCK_C": config.apply_channels, "num_warps": config.apply_warps,
        }  # fmt: skip
        channels = of_channels(at_means, first), of_channels(at_scales, first)
        applied.append(
            Bound(
                _apply,
                (ceil_div(HW, config.apply_rows), ceil_div(own, config.apply_channels), N),
                (own, C, HW),
                constants,
                (None, from_(first, N * C * HW), *channels, from_(first, C), from_(first, N * C), None),
            )
        )
    fold = Bound(
        _fold,
        (groups, N),
        (C, HW, groups, slices, rows_per_slice, eps),
        {
            "HAS_WEIGHT": weight is not None, "HAS_ADD": add is not None,
            "BLOCK_S": block_s, "BLOCK_G": block_g, "num_warps": 4,
        },
        (of_slices(0), of_slices(at_m2s), None, None, of_channels(at_means), of_channels(at_scales)),
    )  # fmt: skip

    def in_two_passes(
        parts: Sequence[torch.Tensor], out: torch.Tensor, weight: Part, bias: Part, add: Part, step: Part
    ) -> None:
        scratch = out.new_empty(at_scales + by_channel, dtype=torch.float32)
        for x, moment in zip(parts, moments, strict=True):
            moment(x, scratch, scratch)
        fold(scratch, scratch, weight, add, scratch, scratch)
        # Backwards, as the kernel goes: what was read last is still in the cache.
        for x, apply in zip(reversed(parts), reversed(applied), strict=True):
            apply(x, out, scratch, scratch, bias, add, step)

    return in_two_passes


def launch(
    parts: tuple[torch.Tensor, ...],
    out: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    eps: float,
    silu: bool,
    step: torch.Tensor | None,
    limit: int,
    config: GroupNormSiluConfig,
    compute_units: int,
) -> None:
    """Fill `out`; `parts` are x, or tensors that have its channels one after the other, where it takes two passes.

    All are dense channels-last, and `out` may be x itself; `add` is dense [N, C]. With a limit, `out` is of 8 bits, and
    `step` is its scale.
    """
    bound = bind(parts, groups, weight, bias, add, eps, silu, limit, config, compute_units)
    with eight_bits_of(_apply, out) as filled:
        bound(parts, filled, weight, bias, add, step)


def _channels(parts: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, int]]:
    """Each part, and from which channel of the whole on it has them."""
    first = 0
    for x in parts:
        yield x, first
        first += x.shape[1]
