"""out = softmax(scale * q k^T) v over heads of any strides, keys in blocks, no score ever in memory.

1. `_attend` keeps a block of queries and its sums on the chip. The head is cut into up to three powers of two, since
   Triton multiplies powers of two only: 40 is 32 + 16, 80 is 64 + 16, 160 is 128 + 32.
2. `_attend_wide` serves heads whose queries do not fit beside their sums: queries are read again for each block of
   keys, a chunk of the head at a time, and a program owns `columns` columns of the output.
3. `_merge` joins the parts where the keys were divided between programs, so that few heads still fill the GPU.

Scores, maxima and sums are float32. Where there are many blocks of keys, only the last is masked. No atomics: the same input gives the same
bits. Programs of one head follow one another, so that its keys and values are read from memory once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from rocm_sd import settings

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["AttentionConfig", "launch", "pieces"]

LOG2_E = 1.4426950408889634
# Triton's interpreter multiplies the bits of bfloat16 as integers; products of either half type are exact in float32.
INTERPRETED = tl.constexpr(settings.current().triton_interpret)
# A key range shorter than this many blocks costs more to merge than it saves.
LEAST_BLOCKS = 4
FEW_BLOCKS = 8


@dataclass(frozen=True)
class AttentionConfig:
    """Queries and keys of a tile, warps and load stages; the rest says how the work is cut.

    `pieces`: the most powers of two that a head is cut into; 1 pads it to the next power of two.
    `ahead`: 1 computes the scores of the next block before the softmax of this one.
    `chunk`: 0 keeps the queries; otherwise they are read again, so many columns at a time (`_attend_wide`).
    `columns`: output columns of a program of `_attend_wide`; each recomputes the scores.
    `programs_per_cu`: where fewer programs than that come about, the keys are divided; 0 never divides them.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    pieces: int
    ahead: int
    chunk: int
    columns: int
    programs_per_cu: int

    @classmethod
    def from_mapping(cls, values: Mapping[str, int]) -> AttentionConfig:
        return cls(**values)


@triton.jit
def _dot(a, b, acc):
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc)


@triton.jit
def _tile(base, row, stride, left, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr):
    """WIDTH columns of one head from FIRST on; zero beyond D, and beyond `left` rows where that can happen."""
    column = FIRST + tl.arange(0, WIDTH)
    at = base + row[:, None] * stride + column[None, :]
    if FIRST + WIDTH > D:
        inside = (column < D)[None, :]
        if MASKED:
            inside = inside & (row < left)[:, None]
        tile = tl.load(at, mask=inside, other=0.0)
    elif MASKED:
        tile = tl.load(at, mask=(row < left)[:, None], other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def _scores(
    q0, q1, q2, k, row, stride, left,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    s = _dot(q0, tl.trans(_tile(k, row, stride, left, 0, D0, D, MASKED)), None)
    if D1:
        s = _dot(q1, tl.trans(_tile(k, row, stride, left, D0, D1, D, MASKED)), s)
    if D2:
        s = _dot(q2, tl.trans(_tile(k, row, stride, left, D0 + D1, D2, D, MASKED)), s)
    if MASKED:
        s = tl.where((row < left)[None, :], s, float("-inf"))
    return s


@triton.jit
def _softmax(s, top, total, scale):
    """The block's weights, the new maximum and sum, and the factor that older sums shrink by."""
    new = tl.maximum(top, tl.max(s, axis=1) * scale)
    p = tl.exp2(s * scale - new[:, None])
    shrink = tl.exp2(top - new)
    return p, new, total * shrink + tl.sum(p, axis=1), shrink


@triton.jit
def _weigh(
    s, top, total, a0, a1, a2, v, row, stride, left, scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    p, top, total, shrink = _softmax(s, top, total, scale)
    p = p.to(v.dtype.element_ty)
    a0 = _dot(p, _tile(v, row, stride, left, 0, D0, D, MASKED), a0 * shrink[:, None])
    if D1:
        a1 = _dot(p, _tile(v, row, stride, left, D0, D1, D, MASKED), a1 * shrink[:, None])
    if D2:
        a2 = _dot(p, _tile(v, row, stride, left, D0 + D1, D2, D, MASKED), a2 * shrink[:, None])
    return top, total, a0, a1, a2


@triton.jit
def _head(base, b, h, row, stride_b, stride_h, stride_row, ALIGN: tl.constexpr):
    """Strides are in units of ALIGN elements. 64-bit only in this scalar base."""
    offset = b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + row.to(tl.int64) * stride_row
    # Triton knows of an argument only whether it is a multiple of 16: a head of 40 would be loaded by 2 bytes.
    return base + offset * ALIGN


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
    m = pid % m_blocks
    split = pid // m_blocks % splits
    head = pid // m_blocks // splits
    b, h = head // H, head % H
    first = split * keys_per_split
    keys = tl.minimum(keys_per_split, T - first)

    row = tl.arange(0, BLOCK_M)
    rows_left = S - m * BLOCK_M
    q = _head(q, b, h, m * BLOCK_M, q_b, q_h, q_s, ALIGN)
    k = _head(k, b, h, first, k_b, k_h, k_s, ALIGN)
    v = _head(v, b, h, first, v_b, v_h, v_s, ALIGN)
    q_s, k_s, v_s = q_s * ALIGN, k_s * ALIGN, v_s * ALIGN
    q0 = _tile(q, row, q_s, rows_left, 0, D0, D, True)
    q1, q2 = q0, q0
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    a0 = tl.zeros([BLOCK_M, D0], tl.float32)
    a1, a2 = total, total
    if D1:
        q1 = _tile(q, row, q_s, rows_left, D0, D1, D, True)
        a1 = tl.zeros([BLOCK_M, D1], tl.float32)
    if D2:
        q2 = _tile(q, row, q_s, rows_left, D0 + D1, D2, D, True)
        a2 = tl.zeros([BLOCK_M, D2], tl.float32)

    key = tl.arange(0, BLOCK_N)
    if MASKED:
        for start in range(0, keys, BLOCK_N):
            left = keys - start
            s = _scores(q0, q1, q2, k, key, k_s, left, D, D0, D1, D2, True)
            top, total, a0, a1, a2 = _weigh(s, top, total, a0, a1, a2, v, key, v_s, left, scale, D, D0, D1, D2, True)
            k += BLOCK_N * k_s
            v += BLOCK_N * v_s
    elif AHEAD:
        # The tensor cores work on the next scores while the other units do this block's softmax.
        s = _scores(q0, q1, q2, k, key, k_s, keys, D, D0, D1, D2, TAIL)
        whole = keys // BLOCK_N
        for _ in range(1, whole):
            k += BLOCK_N * k_s
            ahead = _scores(q0, q1, q2, k, key, k_s, keys, D, D0, D1, D2, False)
            top, total, a0, a1, a2 = _weigh(s, top, total, a0, a1, a2, v, key, v_s, keys, scale, D, D0, D1, D2, False)
            v += BLOCK_N * v_s
            s = ahead
        left = keys
        if TAIL:
            left = keys - whole * BLOCK_N
            if (whole > 0) & (left > 0):
                k += BLOCK_N * k_s
                ahead = _scores(q0, q1, q2, k, key, k_s, left, D, D0, D1, D2, True)
                top, total, a0, a1, a2 = _weigh(
                    s, top, total, a0, a1, a2, v, key, v_s, keys, scale, D, D0, D1, D2, False
                )
                v += BLOCK_N * v_s
                s = ahead
            left = tl.where(left > 0, left, BLOCK_N)
        top, total, a0, a1, a2 = _weigh(s, top, total, a0, a1, a2, v, key, v_s, left, scale, D, D0, D1, D2, TAIL)
    else:
        whole = keys // BLOCK_N
        for _ in range(whole):
            s = _scores(q0, q1, q2, k, key, k_s, keys, D, D0, D1, D2, False)
            top, total, a0, a1, a2 = _weigh(s, top, total, a0, a1, a2, v, key, v_s, keys, scale, D, D0, D1, D2, False)
            k += BLOCK_N * k_s
            v += BLOCK_N * v_s
        if TAIL:
            left = keys - whole * BLOCK_N
            if left > 0:
                s = _scores(q0, q1, q2, k, key, k_s, left, D, D0, D1, D2, True)
                top, total, a0, a1, a2 = _weigh(
                    s, top, total, a0, a1, a2, v, key, v_s, left, scale, D, D0, D1, D2, True
                )

    if SPLIT:
        at = (split * (tl.num_programs(0) // (m_blocks * splits)) + head).to(tl.int64) * S + m * BLOCK_M
        tl.store(tops + at + row, top, mask=row < rows_left)
        tl.store(totals + at + row, total, mask=row < rows_left)
        target, stride = parts + at * D, D
    else:
        share = 1.0 / total
        a0 *= share[:, None]
        if D1:
            a1 *= share[:, None]
        if D2:
            a2 *= share[:, None]
        target, stride = _head(out, b, h, m * BLOCK_M, S * H * (D // ALIGN), D // ALIGN, H * (D // ALIGN), ALIGN), H * D
    _store(target, row, stride, rows_left, a0, 0, D0, D)
    if D1:
        _store(target, row, stride, rows_left, a1, D0, D1, D)
    if D2:
        _store(target, row, stride, rows_left, a2, D0 + D1, D2, D)


@triton.jit
def _attend_wide(
    q, k, v, out, parts, tops, totals,
    S, T, H, q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, scale, m_blocks, splits, keys_per_split, slices,
    D: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, SPLIT: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    # Slices of the same queries side by side: they read the same queries and keys.
    slice_id = pid % slices
    m = pid // slices % m_blocks
    split = pid // slices // m_blocks % splits
    head = pid // slices // m_blocks // splits
    b, h = head // H, head % H
    first = split * keys_per_split
    keys = tl.minimum(keys_per_split, T - first)

    row = tl.arange(0, BLOCK_M)
    key = tl.arange(0, BLOCK_N)
    lane = tl.arange(0, CHUNK)
    column = slice_id * COLUMNS + tl.arange(0, COLUMNS)
    rows_left = S - m * BLOCK_M
    q = _head(q, b, h, m * BLOCK_M, q_b, q_h, q_s, ALIGN)
    k = _head(k, b, h, first, k_b, k_h, k_s, ALIGN)
    v = _head(v, b, h, first, v_b, v_h, v_s, ALIGN)
    q_s, k_s, v_s = q_s * ALIGN, k_s * ALIGN, v_s * ALIGN
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, COLUMNS], tl.float32)

    for start in range(0, keys, BLOCK_N):
        s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        # A loop that is not unrolled: its loads depend on c, so the compiler cannot keep the queries in registers.
        for c in range(0, D, CHUNK):
            in_head = (c + lane < D)[None, :]
            q_inside = (row < rows_left)[:, None]
            if D % CHUNK:
                q_inside = q_inside & in_head
            q_tile = tl.load(q + c + row[:, None] * q_s + lane[None, :], mask=q_inside, other=0.0)
            k_at = k + c + key[:, None] * k_s + lane[None, :]
            if MASKED:
                k_tile = tl.load(k_at, mask=(key < keys - start)[:, None] & in_head, other=0.0)
            elif D % CHUNK:
                k_tile = tl.load(k_at, mask=in_head, other=0.0)
            else:
                k_tile = tl.load(k_at)
            s = _dot(q_tile, tl.trans(k_tile), s)
        if MASKED:
            s = tl.where((key < keys - start)[None, :], s, float("-inf"))
        p, top, total, shrink = _softmax(s, top, total, scale)
        v_at = v + key[:, None] * v_s + column[None, :]
        if MASKED:
            v_tile = tl.load(v_at, mask=(key < keys - start)[:, None] & (column < D)[None, :], other=0.0)
        elif D % COLUMNS:
            v_tile = tl.load(v_at, mask=(column < D)[None, :], other=0.0)
        else:
            v_tile = tl.load(v_at)
        acc = _dot(p.to(v.dtype.element_ty), v_tile, acc * shrink[:, None])
        k += BLOCK_N * k_s
        v += BLOCK_N * v_s

    if SPLIT:
        heads = tl.num_programs(0) // (slices * m_blocks * splits)
        at = (split * heads + head).to(tl.int64) * S + m * BLOCK_M
        # Every slice has the same maxima and sums.
        if slice_id == 0:
            tl.store(tops + at + row, top, mask=row < rows_left)
            tl.store(totals + at + row, total, mask=row < rows_left)
        target, stride = parts + at * D, D
    else:
        acc = acc / total[:, None]
        target, stride = _head(out, b, h, m * BLOCK_M, S * H * (D // ALIGN), D // ALIGN, H * (D // ALIGN), ALIGN), H * D
    at = target + row[:, None] * stride + column[None, :]
    tl.store(at, acc.to(target.dtype.element_ty), mask=(row < rows_left)[:, None] & (column < D)[None, :])


@triton.jit
def _merge(
    parts, tops, totals, out, S, H, heads, splits,
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
        old, add = tl.exp2(top - new), tl.exp2(part_top - new)
        acc = acc * old[:, None] + part * add[:, None]
        total = total * old + part_total * add
        top = new
        at += heads * S
    target = _head(out, b, h, m * ROWS, S * H * (D // ALIGN), D // ALIGN, H * (D // ALIGN), ALIGN)
    value = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(target + row[:, None] * (H * D) + column[None, :], value, mask=inside)


def pieces(d: int, most: int) -> tuple[int, int, int]:
    """Powers of two from 16 on that cover a head of `d`, at most `most` of them; 0 stands for none."""
    cut: list[int] = []
    left = -(-d // 16) * 16
    while left > 0:
        last = len(cut) == most - 1
        size = triton.next_power_of_2(left) if last else 1 << (left.bit_length() - 1)
        cut.append(size)
        left -= size
    d0, d1, d2 = (*cut, 0, 0)[:3]
    return d0, d1, d2


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
    """Fill `out`, dense [B, S, H, D]; q, k and v have columns side by side and any other strides; scale >= 0."""
    B, S, H, D = q.shape
    T = k.shape[1]
    m_blocks = triton.cdiv(S, config.block_m)
    slices = triton.cdiv(D, config.columns) if config.chunk else 1
    blocks = triton.cdiv(T, config.block_n)
    wanted = compute_units * config.programs_per_cu // (B * H * m_blocks * slices)
    blocks_per_split = triton.cdiv(blocks, max(1, min(wanted, blocks // LEAST_BLOCKS)))
    splits = triton.cdiv(blocks, blocks_per_split)

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
    partial = T % config.block_n != 0
    grid = (B * H * splits * m_blocks * slices,)
    if config.chunk:
        _attend_wide[grid](*common, slices, CHUNK=config.chunk, COLUMNS=config.columns, MASKED=partial, **named)
    else:
        d0, d1, d2 = pieces(D, config.pieces)
        # The code of a masked tail takes registers from the loop before it: at head size 160 that is 71 spilled on
        # gfx1100. A mask costs nothing where blocks are few, and little where each score takes many products.
        masked = partial and (blocks <= FEW_BLOCKS or D > 128)
        _attend[grid](
            *common, D0=d0, D1=d1, D2=d2, MASKED=masked, TAIL=partial and not masked, AHEAD=bool(config.ahead), **named
        )
    if splits > 1:
        width = triton.next_power_of_2(D)
        rows = max(1, 2048 // width)
        _merge[(triton.cdiv(S, rows), B * H)](
            parts, tops, totals, out, S, H, B * H, splits,
            D=D, ROWS=rows, WIDTH=width, ALIGN=align, num_warps=4,
        )  # fmt: skip
