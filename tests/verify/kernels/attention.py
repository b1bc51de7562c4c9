"""o = softmax(q @ k^T * scale) @ v, causal or not, in one pass with running maxima; q, k, v: [heads, length, D]."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attention(
    q, k, v, o, length, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, PRECISION: tl.constexpr = "ieee",
):  # fmt: skip
    head = tl.program_id(1) * length * D
    m = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    d = tl.arange(0, D)
    rows = head + m[:, None] * D + d[None, :]
    query = tl.load(q + rows, mask=(m < length)[:, None], other=0.0)
    largest = tl.full([TILE_M], -1.0e30, tl.float32)
    weight = tl.zeros([TILE_M], tl.float32)
    total = tl.zeros([TILE_M, D], tl.float32)
    for start in range(0, length, TILE_N):
        n = start + tl.arange(0, TILE_N)
        key = tl.load(k + head + n[None, :] * D + d[:, None], mask=(n < length)[None, :], other=0.0)
        score = tl.dot(query, key, input_precision=PRECISION) * scale
        allowed = (n < length)[None, :]
        if CAUSAL:
            allowed = allowed & (n[None, :] <= m[:, None])
        score = tl.where(allowed, score, -1.0e30)
        peak = tl.maximum(largest, tl.max(score, axis=1))
        power = tl.exp(score - peak[:, None])
        shrink = tl.exp(largest - peak)
        weight = weight * shrink + tl.sum(power, axis=1)
        value = tl.load(v + head + n[:, None] * D + d[None, :], mask=(n < length)[:, None], other=0.0)
        total = tl.dot(power.to(value.dtype), value, total * shrink[:, None], input_precision=PRECISION)
        largest = peak
    tl.store(o + rows, (total / weight[:, None]).to(o.dtype.element_ty), mask=(m < length)[:, None])


def launch(q, k, v, o, *, causal=False, precision="ieee", tile=(32, 32), num_warps=4, num_stages=1):
    heads, length, D = q.shape
    attention[(triton.cdiv(length, tile[0]), heads)](
        q, k, v, o, length, D**-0.5, CAUSAL=causal, D=D, TILE_M=tile[0], TILE_N=tile[1], PRECISION=precision,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
