"""y = x @ weight.T + bias + residual, x: [M, K], weight: [N, K], y: [M, N]; float32 accumulation, one rounding.

1. `_product` computes tiles of y and adds bias and residual before it rounds; or, where few tiles would leave the GPU
   idle, each program takes a slice of K and writes its float32 part.
2. `_fold` adds the parts in their order, then bias and residual. No atomics: the same input gives the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from rocm_sd.kernels.sizes import ceil_div, power_of_2
from rocm_sd.kernels.triton.bound import Bound

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_sd.kernels.configs.linear_residual import LinearResidualConfig
    from rocm_sd.kernels.triton.bound import Part

__all__ = ["bind", "launch"]

# One wave, so that a lane has 4 or 8 float32 values: 16-byte loads, in waves of 64 as in waves of 32.
_FOLD_BLOCK = 256


@triton.jit
def _product(
    x, weight, bias, residual, y, M, N, K, x_stride, weight_stride, residual_stride, k_per_split,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, EVEN_K: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    # Tiles in bands of GROUP_M rows: programs that run at once share rows of x and of weight in the L2 cache.
    program = tl.program_id(0)
    m_tiles, n_tiles = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    band = program // (GROUP_M * n_tiles)
    band_height = tl.minimum(m_tiles - band * GROUP_M, GROUP_M)
    within = program % (GROUP_M * n_tiles)
    first_m = (band * GROUP_M + within % band_height) * BLOCK_M
    first_n = (within // band_height) * BLOCK_N

    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows beyond the edge repeat the last one: their results are not stored, and no load needs a mask for them.
    x_at = tl.minimum(m, M - 1 - first_m)[:, None] * x_stride + k[None, :]
    weight_at = tl.minimum(n, N - 1 - first_n)[None, :] * weight_stride + k[:, None]
    # 64-bit only in the scalar bases.
    x += first_m.to(tl.int64) * x_stride
    weight += first_n.to(tl.int64) * weight_stride
    k_left = K
    if SPLIT:
        k_first = tl.program_id(1) * k_per_split
        x += k_first
        weight += k_first
        k_left = tl.minimum(K - k_first, k_per_split)

    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, k_left, BLOCK_K):
        if EVEN_K:
            left = tl.load(x + x_at)
            right = tl.load(weight + weight_at)
        else:
            inside = start + k < k_left
            left = tl.load(x + x_at, mask=inside[None, :], other=0.0)
            right = tl.load(weight + weight_at, mask=inside[:, None], other=0.0)
        total = tl.dot(left, right, total)
        x += BLOCK_K
        weight += BLOCK_K

    inside = (first_m + m < M)[:, None] & (first_n + n < N)[None, :]
    y += first_m.to(tl.int64) * N + first_n
    if SPLIT:
        y += tl.program_id(1).to(tl.int64) * M * N
    else:
        if HAS_BIAS:
            total += tl.load(bias + first_n + n, mask=first_n + n < N, other=0.0).to(tl.float32)[None, :]
        if HAS_RESIDUAL:
            residual += first_m.to(tl.int64) * residual_stride + first_n
            at = m[:, None] * residual_stride + n[None, :]
            total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + m[:, None] * N + n[None, :], total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _fold(
    parts, bias, residual, y, N, part_size, residual_stride, splits, n_blocks,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = program // n_blocks
    n = (program % n_blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    total = tl.zeros([BLOCK], tl.float32)
    parts += row.to(tl.int64) * N
    for _ in range(splits):
        total += tl.load(parts + n, mask=inside, other=0.0)
        parts += part_size
    if HAS_BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual += row.to(tl.int64) * residual_stride
        total += tl.load(residual + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row.to(tl.int64) * N + n, total.to(y.dtype.element_ty), mask=inside)


def bind(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    config: LinearResidualConfig,
) -> Callable[..., None]:
    """bound(x, weight, bias, residual, y) is `launch` for tensors that lie as these."""
    (M, K), N = x.shape, weight.shape[0]
    steps = ceil_div(K, config.block_k)
    steps_per_split = ceil_div(steps, config.split_k)
    splits = ceil_div(steps, steps_per_split)
    tiles = ceil_div(M, config.block_m) * ceil_div(N, config.block_n)
    residual_stride = 0 if residual is None else residual.stride(0)
    has = {"HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None}
    constants = {
        **has, "EVEN_K": K % config.block_k == 0, "SPLIT": splits > 1,
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP_M": config.group_m,
        "num_warps": config.warps, "num_stages": config.stages,
    }  # fmt: skip
    numbers = (M, N, K, x.stride(0), weight.stride(0), residual_stride, steps_per_split * config.block_k)
    product = Bound(_product, (tiles, splits), numbers, constants)
    if splits == 1:
        return product
    block = min(_FOLD_BLOCK, power_of_2(N))
    n_blocks = ceil_div(N, block)
    sizes = (N, M * N, residual_stride, splits, n_blocks)
    fold = Bound(_fold, (M * n_blocks,), sizes, {**has, "BLOCK": block, "num_warps": 1})

    def in_parts(x: torch.Tensor, weight: torch.Tensor, bias: Part, residual: Part, y: torch.Tensor) -> None:
        parts = y.new_empty((splits, M, N), dtype=torch.float32)
        product(x, weight, bias, residual, parts)
        fold(parts, bias, residual, y)

    return in_parts


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    config: LinearResidualConfig,
) -> None:
    """Fill `y`, dense [M, N]; rows of `x`, `weight` and `residual` may be any distance apart."""
    if isinstance(_product, InterpretedFunction):
        # Triton's interpreter multiplies bfloat16 matrices as if their bits were integers; in float32 they are exact.
        x, weight = x.float(), weight.float()
    bind(x, weight, bias, residual, config)(x, weight, bias, residual, y)
