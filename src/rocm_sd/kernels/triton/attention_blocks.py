"""What attention does with a block of keys, and how it goes over all of them: functions that kernels call.

Up to three pieces of the head stand side by side: q0, q1, q2 and their sums a0, a1, a2, of D0, D1 and D2 columns. A
width of 0 is a piece that is not there, of which nothing is read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rocm_sd import settings

__all__ = ["dot", "over_keys", "over_keys_ahead", "over_keys_masked", "softmax", "tile"]

# Triton's interpreter multiplies the bits of bfloat16 as integers; products of either half type are exact in float32.
INTERPRETED = tl.constexpr(settings.current().triton_interpret)


@triton.jit
def dot(a, b, acc):
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc)


@triton.jit
def tile(base, row, stride, left, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr):
    """WIDTH columns of one head from FIRST on; zero beyond D, and beyond `left` rows where that can happen."""
    column = FIRST + tl.arange(0, WIDTH)
    at = base + row[:, None] * stride + column[None, :]
    if FIRST + WIDTH > D:
        inside = (column < D)[None, :]
        if MASKED:
            inside = inside & (row < left)[:, None]
        value = tl.load(at, mask=inside, other=0.0)
    elif MASKED:
        value = tl.load(at, mask=(row < left)[:, None], other=0.0)
    else:
        value = tl.load(at)
    return value


@triton.jit
def _scores(
    q0, q1, q2, k, row, stride, left,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    s = dot(q0, tl.trans(tile(k, row, stride, left, 0, D0, D, MASKED)), None)
    if D1:
        s = dot(q1, tl.trans(tile(k, row, stride, left, D0, D1, D, MASKED)), s)
    if D2:
        s = dot(q2, tl.trans(tile(k, row, stride, left, D0 + D1, D2, D, MASKED)), s)
    if MASKED:
        s = tl.where((row < left)[None, :], s, float("-inf"))
    return s


@triton.jit
def softmax(s, top, total, scale):
    """The block's weights, the new maximum and sum, and the factor that older sums shrink by.

    The difference comes first: s * scale - top * scale, as one fused step, rounds only one of the two products, and at
    scores of 1e10 what is left of the other is an exponent of a thousand.
    """
    new = tl.maximum(top, tl.max(s, axis=1))
    p = tl.exp2((s - new[:, None]) * scale)
    shrink = tl.exp2((top - new) * scale)
    return p, new, total * shrink + tl.sum(p, axis=1), shrink


@triton.jit
def _weigh(
    s, top, total, a0, a1, a2, v, row, stride, left, scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    p, top, total, shrink = softmax(s, top, total, scale)
    p = p.to(v.dtype.element_ty)
    a0 = dot(p, tile(v, row, stride, left, 0, D0, D, MASKED), a0 * shrink[:, None])
    if D1:
        a1 = dot(p, tile(v, row, stride, left, D0, D1, D, MASKED), a1 * shrink[:, None])
    if D2:
        a2 = dot(p, tile(v, row, stride, left, D0 + D1, D2, D, MASKED), a2 * shrink[:, None])
    return top, total, a0, a1, a2


@triton.jit
def over_keys(
    q0, q1, q2, k, v, k_s, v_s, keys, top, total, a0, a1, a2, scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    BLOCK_N: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    key = tl.arange(0, BLOCK_N)
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
            top, total, a0, a1, a2 = _weigh(s, top, total, a0, a1, a2, v, key, v_s, left, scale, D, D0, D1, D2, True)
    return top, total, a0, a1, a2


@triton.jit
def over_keys_masked(
    q0, q1, q2, k, v, k_s, v_s, keys, top, total, a0, a1, a2, scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    key = tl.arange(0, BLOCK_N)
    for start in range(0, keys, BLOCK_N):
        left = keys - start
        s = _scores(q0, q1, q2, k, key, k_s, left, D, D0, D1, D2, True)
        top, total, a0, a1, a2 = _weigh(s, top, total, a0, a1, a2, v, key, v_s, left, scale, D, D0, D1, D2, True)
        k += BLOCK_N * k_s
        v += BLOCK_N * v_s
    return top, total, a0, a1, a2


@triton.jit
def over_keys_ahead(
    q0, q1, q2, k, v, k_s, v_s, keys, top, total, a0, a1, a2, scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    BLOCK_N: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """The matrix unit works on the next scores while the other units do this block's softmax."""
    key = tl.arange(0, BLOCK_N)
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
            top, total, a0, a1, a2 = _weigh(s, top, total, a0, a1, a2, v, key, v_s, keys, scale, D, D0, D1, D2, False)
            v += BLOCK_N * v_s
            s = ahead
        left = tl.where(left > 0, left, BLOCK_N)
    return _weigh(s, top, total, a0, a1, a2, v, key, v_s, left, scale, D, D0, D1, D2, TAIL)
