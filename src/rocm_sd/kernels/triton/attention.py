"""out = softmax(scale * q k^T) v over heads of any strides, keys in blocks, no score in memory but for `_softmax_rows`.

1. `_attend` keeps a block of queries and its sums on the chip. The head is cut into up to three powers of two, since
   Triton multiplies powers of two only: 40 is 32 + 16, 80 is 64 + 16, 160 is 128 + 32.
2. `_attend_wide` serves heads whose queries do not fit beside their sums: queries are read again for each block of
   keys, a chunk of the head at a time, and a program owns `columns` columns of the output.
3. `_merge` joins the parts where the keys were divided between programs, so that few heads still fill the GPU.
4. `_softmax_rows` stands between the two products of a library, for heads so wide that writing the scores costs less
   than what flash attention wastes on them.

Scores, maxima and sums are float32. Where there are many blocks of keys, only the last is masked. No atomics: the same
input gives the same bits. Programs of one head follow one another, so that its keys and values are read from memory
once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from rocm_sd.kernels.configs.attention import pieces
from rocm_sd.kernels.sizes import ceil_div, power_of_2
from rocm_sd.kernels.triton.assembler import loses_last_block
from rocm_sd.kernels.triton.attention_blocks import (
    dot,
    over_keys,
    over_keys_ahead,
    over_keys_masked,
    softmax,
    tile,
)

if TYPE_CHECKING:
    from rocm_sd.kernels.configs.attention import AttentionConfig

__all__ = ["launch", "softmax_rows"]

LOG2_E = 1.4426950408889634
# 32 float32 values a lane in 16 waves of 32: longer rows are read twice.
LONGEST_ROW = 16384


@triton.jit
def _head(base, b, h, row, stride_b, stride_h, stride_row, ALIGN: tl.constexpr):
    """Strides are in units of ALIGN elements. 64-bit only in this scalar base."""
    offset = b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + row.to(tl.int64) * stride_row
    # Triton knows of an argument only whether it is a multiple of 16: a head of 40 would be loaded by 2 bytes.
    return base + offset * ALIGN


@triton.jit
def _rows_out(
    out, parts, tops, totals, top, total, b, h, head, heads, split, m, row, left, is_first, S, H,
    D: tl.constexpr, BLOCK_M: tl.constexpr, SPLIT: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Where the rows go, how far apart they are, and their factor; a part keeps its maxima and sums for `_merge`."""
    if SPLIT:
        at = (split * heads + head).to(tl.int64) * S + m * BLOCK_M
        if is_first:
            tl.store(tops + at + row, top, mask=row < left)
            tl.store(totals + at + row, total, mask=row < left)
        base, stride, share = parts + at * D, D, tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        width = D // ALIGN
        base = _head(out, b, h, m * BLOCK_M, S * H * width, width, H * width, ALIGN)
        stride, share = H * D, 1.0 / total
    return base, stride, share


@triton.jit
def _store(base, row, stride, left, value, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    column = FIRST + tl.arange(0, WIDTH)
    at = base + row[:, None] * stride + column[None, :]
    tl.store(at, value.to(base.dtype.element_ty), mask=(row < left)[:, None] & (column < D)[None, :])


@triton.jit
def _attend(
    q, k, v, out, parts, tops, totals,
    S, T, H, q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, scale, m_blocks, splits, keys_per_split,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, TAIL: tl.constexpr, SPLIT: tl.constexpr,
    AHEAD: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    m, split, head = pid % m_blocks, pid // m_blocks % splits, pid // m_blocks // splits
    b, h = head // H, head % H
    first = split * keys_per_split
    keys = tl.minimum(keys_per_split, T - first)
    row = tl.arange(0, BLOCK_M)
    rows_left = S - m * BLOCK_M
    q = _head(q, b, h, m * BLOCK_M, q_b, q_h, q_s, ALIGN)
    k = _head(k, b, h, first, k_b, k_h, k_s, ALIGN)
    v = _head(v, b, h, first, v_b, v_h, v_s, ALIGN)
    q_s, k_s, v_s = q_s * ALIGN, k_s * ALIGN, v_s * ALIGN

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    q0 = tile(q, row, q_s, rows_left, 0, D0, D, True)
    a0 = tl.zeros([BLOCK_M, D0], tl.float32)
    # Of a piece that is not there nothing is read: any value may stand for it.
    q1, q2, a1, a2 = q0, q0, total, total
    if D1:
        q1 = tile(q, row, q_s, rows_left, D0, D1, D, True)
        a1 = tl.zeros([BLOCK_M, D1], tl.float32)
    if D2:
        q2 = tile(q, row, q_s, rows_left, D0 + D1, D2, D, True)
        a2 = tl.zeros([BLOCK_M, D2], tl.float32)

    if MASKED:
        top, total, a0, a1, a2 = over_keys_masked(
            q0, q1, q2, k, v, k_s, v_s, keys, top, total, a0, a1, a2, scale, D, D0, D1, D2, BLOCK_N
        )
    elif AHEAD:
        top, total, a0, a1, a2 = over_keys_ahead(
            q0, q1, q2, k, v, k_s, v_s, keys, top, total, a0, a1, a2, scale, D, D0, D1, D2, BLOCK_N, TAIL
        )
    else:
        top, total, a0, a1, a2 = over_keys(
            q0, q1, q2, k, v, k_s, v_s, keys, top, total, a0, a1, a2, scale, D, D0, D1, D2, BLOCK_N, TAIL
        )

    heads = tl.num_programs(0) // (m_blocks * splits)
    base, stride, share = _rows_out(
        out, parts, tops, totals, top, total, b, h, head, heads, split, m, row, rows_left, True, S, H,
        D, BLOCK_M, SPLIT, ALIGN,
    )  # fmt: skip
    _store(base, row, stride, rows_left, a0 * share[:, None], 0, D0, D)
    if D1:
        _store(base, row, stride, rows_left, a1 * share[:, None], D0, D1, D)
    if D2:
        _store(base, row, stride, rows_left, a2 * share[:, None], D0 + D1, D2, D)


@triton.jit
def _chunk(base, row, stride, left, c, D: tl.constexpr, CHUNK: tl.constexpr, MASKED: tl.constexpr):
    """Columns c to c + CHUNK of the rows; zero beyond D, and beyond `left` rows where that can happen."""
    lane = tl.arange(0, CHUNK)
    at = base + c + row[:, None] * stride + lane[None, :]
    if D % CHUNK:
        inside = (c + lane < D)[None, :]
        if MASKED:
            inside = inside & (row < left)[:, None]
        value = tl.load(at, mask=inside, other=0.0)
    elif MASKED:
        value = tl.load(at, mask=(row < left)[:, None], other=0.0)
    else:
        value = tl.load(at)
    return value


@triton.jit
def _attend_wide(
    q, k, v, out, parts, tops, totals,
    S, T, H, q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, scale, m_blocks, splits, keys_per_split, slices,
    D: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, SPLIT: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    # Slices of the same queries side by side: they read the same queries and keys.
    slice_id, m = pid % slices, pid // slices % m_blocks
    split, head = pid // slices // m_blocks % splits, pid // slices // m_blocks // splits
    b, h = head // H, head % H
    first = split * keys_per_split
    keys = tl.minimum(keys_per_split, T - first)
    row = tl.arange(0, BLOCK_M)
    key = tl.arange(0, BLOCK_N)
    rows_left = S - m * BLOCK_M
    q = _head(q, b, h, m * BLOCK_M, q_b, q_h, q_s, ALIGN)
    k = _head(k, b, h, first, k_b, k_h, k_s, ALIGN)
    v = _head(v, b, h, first, v_b, v_h, v_s, ALIGN)
    q_s, k_s, v_s = q_s * ALIGN, k_s * ALIGN, v_s * ALIGN

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    for start in range(0, keys, BLOCK_N):
        left = keys - start
        s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        # Not unrolled: the loads depend on c, so the compiler cannot keep the queries in registers.
        for c in range(0, D, CHUNK):
            q_tile = _chunk(q, row, q_s, rows_left, c, D, CHUNK, True)
            s = dot(q_tile, tl.trans(_chunk(k, key, k_s, left, c, D, CHUNK, MASKED)), s)
        if MASKED:
            s = tl.where((key < left)[None, :], s, float("-inf"))
        p, top, total, shrink = softmax(s, top, total, scale)
        v_tile = _chunk(v, key, v_s, left, slice_id * COLUMNS, D, COLUMNS, MASKED)
        acc = dot(p.to(v.dtype.element_ty), v_tile, acc * shrink[:, None])
        k += BLOCK_N * k_s
        v += BLOCK_N * v_s

    heads = tl.num_programs(0) // (slices * m_blocks * splits)
    base, stride, share = _rows_out(
        out, parts, tops, totals, top, total, b, h, head, heads, split, m, row, rows_left, slice_id == 0, S, H,
        D, BLOCK_M, SPLIT, ALIGN,
    )  # fmt: skip
    column = slice_id * COLUMNS + tl.arange(0, COLUMNS)
    at = base + row[:, None] * stride + column[None, :]
    inside = (row < rows_left)[:, None] & (column < D)[None, :]
    tl.store(at, (acc * share[:, None]).to(base.dtype.element_ty), mask=inside)


@triton.jit
def _merge(
    parts, tops, totals, out, S, H, heads, splits, scale,
    D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    m, head = tl.program_id(0), tl.program_id(1)
    b, h = head // H, head % H
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    left = S - m * ROWS
    inside = (row < left)[:, None] & (column < D)[None, :]
    at = head.to(tl.int64) * S + m * ROWS
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for _ in range(splits):
        # Rows beyond the last get a finite maximum, so that they stay numbers.
        part_top = tl.load(tops + at + row, mask=row < left, other=0.0)
        part_total = tl.load(totals + at + row, mask=row < left, other=1.0)
        part = tl.load(parts + at * D + row[:, None] * D + column[None, :], mask=inside, other=0.0)
        new = tl.maximum(top, part_top)
        old, add = tl.exp2((top - new) * scale), tl.exp2((part_top - new) * scale)
        acc = acc * old[:, None] + part * add[:, None]
        total = total * old + part_total * add
        top = new
        at += heads * S
    target = _head(out, b, h, m * ROWS, S * H * (D // ALIGN), D // ALIGN, H * (D // ALIGN), ALIGN)
    value = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(target + row[:, None] * (H * D) + column[None, :], value, mask=inside)


@triton.jit
def _softmax_rows(scores, weights, totals, T, scale, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """weights = exp2(scale * (score - largest)), totals = their sums in float32; a program a row."""
    row = tl.program_id(0)
    key = tl.arange(0, BLOCK)
    scores += row.to(tl.int64) * T
    weights += row.to(tl.int64) * T
    if WHOLE:
        s = tl.load(scores + key, mask=key < T, other=float("-inf"))
        p = tl.exp2((s - tl.max(s, axis=0)) * scale)
        tl.store(weights + key, p.to(weights.dtype.element_ty), mask=key < T)
        tl.store(totals + row, tl.sum(p, axis=0))
    else:
        largest = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, T, BLOCK):
            largest = tl.maximum(largest, tl.load(scores + start + key, mask=start + key < T, other=float("-inf")))
        top = tl.max(largest, axis=0)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, T, BLOCK):
            s = tl.load(scores + start + key, mask=start + key < T, other=float("-inf"))
            p = tl.exp2((s - top) * scale)
            total += p
            tl.store(weights + start + key, p.to(weights.dtype.element_ty), mask=start + key < T)
        tl.store(totals + row, tl.sum(total, axis=0))


def softmax_rows(scores: torch.Tensor, weights: torch.Tensor, totals: torch.Tensor, scale: float) -> None:
    """Fill `weights`, not yet divided by their sums, and `totals`; scores: dense float32 [rows, T]; scale >= 0."""
    rows, T = scores.shape
    whole = T <= LONGEST_ROW
    block = power_of_2(T) if whole else 4096
    # A lane for every value: where waves hold copies, their sums can differ in the last bit, and either is kept.
    warps = max(1, min(16, block // 256))
    _softmax_rows[(rows,)](scores, weights, totals, T, scale * LOG2_E, BLOCK=block, WHOLE=whole, num_warps=warps)


def _alignment(*tensors: torch.Tensor) -> int:
    """How many elements each row of each head is a multiple of, up to 8: 16 bytes of half precision."""
    align = 8
    for tensor in tensors:
        for stride in tensor.stride()[:-1]:
            while stride % align:
                align //= 2
    return align


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    config: AttentionConfig,
    compute_units: int,
) -> None:
    """Fill `out`, dense [B, S, H, D]; q, k and v have columns side by side and any other strides; scale > 0."""
    B, S, H, D = q.shape
    T = k.shape[1]
    m_blocks = ceil_div(S, config.block_m)
    slices = ceil_div(D, config.columns) if config.chunk else 1
    splits, blocks_per_split = config.key_ranges(B * H, S, T, D, compute_units)

    parts, tops, totals = out, out, out
    if splits > 1:
        parts = out.new_empty((splits, B * H, S, D), dtype=torch.float32)
        tops, totals = out.new_empty((2, splits, B * H, S), dtype=torch.float32)
    align = _alignment(q, k, v, out)
    strides = (stride // align for tensor in (q, k, v) for stride in tensor.stride()[:3])
    common = (
        q, k, v, out, parts, tops, totals, S, T, H, *strides,
        scale * LOG2_E, m_blocks, splits, blocks_per_split * config.block_n,
    )  # fmt: skip
    named: dict[str, Any] = {
        "D": D,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "SPLIT": splits > 1,
        "ALIGN": align,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }
    loop = config.key_loop(T, D)
    grid = (B * H * splits * m_blocks * slices,)
    if config.chunk:
        _attend_wide[grid](
            *common, slices, CHUNK=config.chunk, COLUMNS=config.columns, MASKED=loop == "masked", **named
        )
    else:
        d0, d1, d2 = pieces(D, config.pieces)
        ahead = bool(config.ahead)
        if d1 and (ahead or loop == "tail") and loses_last_block(q.device, config):
            # With a mask in every step, or none at all, nothing is left to do after the loop.
            loop, ahead = "masked" if loop == "tail" else loop, False
        _attend[grid](
            *common, D0=d0, D1=d1, D2=d2,
            MASKED=loop == "masked", TAIL=loop == "tail", AHEAD=ahead, **named,
        )  # fmt: skip
    if splits > 1:
        width = power_of_2(D)
        rows = max(1, 2048 // width)
        _merge[(ceil_div(S, rows), B * H)](
            parts, tops, totals, out, S, H, B * H, splits, scale * LOG2_E,
            D=D, ROWS=rows, WIDTH=width, ALIGN=align, num_warps=4,
        )  # fmt: skip
