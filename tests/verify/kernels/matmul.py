"""c = a @ b with float32 sums; a: [M, K], b: [K, N], row-major; sizes need not be multiples of the tile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def matmul(a, b, c, M, N, K, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr):
    m = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    for start in range(0, K, TILE_K):
        k = start + tl.arange(0, TILE_K)
        left = tl.load(a + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        right = tl.load(b + k[:, None] * N + n[None, :], mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
        total = tl.dot(left, right, total)
    inside = (m < M)[:, None] & (n < N)[None, :]
    tl.store(c + m[:, None] * N + n[None, :], total.to(c.dtype.element_ty), mask=inside)


def launch(a, b, c, *, tile=(32, 32, 32), num_warps=4, num_stages=1):
    (M, K), N = a.shape, b.shape[1]
    grid = (triton.cdiv(M, tile[0]), triton.cdiv(N, tile[1]))
    matmul[grid](
        a, b, c, M, N, K, TILE_M=tile[0], TILE_N=tile[1], TILE_K=tile[2], num_warps=num_warps, num_stages=num_stages
    )
