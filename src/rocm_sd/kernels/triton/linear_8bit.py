"""y = (x @ weight.T) * x_scale * weight_scale + bias + residual, x: [M, K] and weight: [N, K] in 8 bits, y: [M, N].

Products of int8 are summed in int32, exactly; those of fp8 in float32. Scales, bias and residual are in the epilogue,
and y is rounded once. The scales are one for each row of x and each row of the weight, or one for all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from rocm_sd.kernels.configs.linear_8bit import LONGEST_QUICK_SUM
from rocm_sd.kernels.sizes import ceil_div
from rocm_sd.kernels.triton.bound import Bound

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_sd.kernels.configs.linear_8bit import Linear8bitConfig

__all__ = ["bind", "imprecise", "launch", "nothing"]


@triton.jit
def nothing(WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    if WHOLE:
        return tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    else:  # noqa: RET505 -- Triton compiles one of the two
        return tl.zeros([BLOCK_M, BLOCK_N], tl.float32)


@triton.jit
def _product_8bit(
    x, x_scale, weight, weight_scale, bias, residual, y, M, N, K, x_stride, weight_stride, residual_stride,
    WHOLE: tl.constexpr, BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, EVEN_K: tl.constexpr, IMPRECISE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_N2: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    # Tiles in bands of GROUP_M rows: programs that run at once share rows of x and of weight in the L2 cache.
    program = tl.program_id(0)
    m_tiles, n_tiles = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N + BLOCK_N2)
    band = program // (GROUP_M * n_tiles)
    band_height = tl.minimum(m_tiles - band * GROUP_M, GROUP_M)
    within = program % (GROUP_M * n_tiles)
    first_m = (band * GROUP_M + within % band_height) * BLOCK_M
    first_n = (within // band_height) * (BLOCK_N + BLOCK_N2)

    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows beyond the edge repeat the last one: their results are not stored, and no load needs a mask for them.
    row = tl.minimum(m, M - 1 - first_m)
    column = tl.minimum(n, N - 1 - first_n)
    x_at = row[:, None] * x_stride + k[None, :]
    weight_at = column[None, :] * weight_stride + k[:, None]
    total = nothing(WHOLE, BLOCK_M, BLOCK_N)
    if BLOCK_N2:
        n2 = BLOCK_N + tl.arange(0, BLOCK_N2)
        column2 = tl.minimum(n2, N - 1 - first_n)
        weight_at2 = column2[None, :] * weight_stride + k[:, None]
        total2 = nothing(WHOLE, BLOCK_M, BLOCK_N2)
    # 64-bit only in the scalar bases.
    x += first_m.to(tl.int64) * x_stride
    weight += first_n.to(tl.int64) * weight_stride

    for start in range(0, K, BLOCK_K):
        inside = start + k < K
        left = tl.load(x + x_at) if EVEN_K else tl.load(x + x_at, mask=inside[None, :], other=0.0)
        right = _steps(weight + weight_at, inside, EVEN_K)
        total = tl.dot(left, right, total, max_num_imprecise_acc=IMPRECISE, out_dtype=total.dtype)
        if BLOCK_N2:
            right = _steps(weight + weight_at2, inside, EVEN_K)
            total2 = tl.dot(left, right, total2, max_num_imprecise_acc=IMPRECISE, out_dtype=total2.dtype)
        x += BLOCK_K
        weight += BLOCK_K

    # One scale for all is read as often as there are rows.
    scale = tl.load(x_scale + (first_m + row) * BY_ROW)
    y += first_m.to(tl.int64) * N + first_n
    if HAS_RESIDUAL:
        residual += first_m.to(tl.int64) * residual_stride + first_n
    rows_inside = first_m + m < M
    _store(
        total, scale, weight_scale, bias, residual, y, rows_inside, m, first_n, n, column, N, residual_stride,
        BY_COLUMN, HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip
    if BLOCK_N2:
        _store(
            total2, scale, weight_scale, bias, residual, y, rows_inside, m, first_n, n2, column2, N, residual_stride,
            BY_COLUMN, HAS_BIAS, HAS_RESIDUAL,
        )  # fmt: skip


@triton.jit
def _steps(at, inside, EVEN_K: tl.constexpr):
    """A block of the depth of some columns."""
    return tl.load(at) if EVEN_K else tl.load(at, mask=inside[:, None], other=0.0)


@triton.jit
def _store(
    total, scale, weight_scale, bias, residual, y, rows_inside, m, first_n, n, column, N, residual_stride,
    BY_COLUMN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Columns n of a tile, of which `column` are those that there are."""
    value = total.to(tl.float32) * scale[:, None]
    value *= tl.load(weight_scale + (first_n + column) * BY_COLUMN)[None, :]
    inside = rows_inside[:, None] & (first_n + n < N)[None, :]
    if HAS_BIAS:
        value += tl.load(bias + first_n + column).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        value += tl.load(residual + m[:, None] * residual_stride + n[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(y + m[:, None] * N + n[None, :], value.to(y.dtype.element_ty), mask=inside)


def imprecise(x: torch.Tensor, depth: int, block_k: int) -> int | None:
    """How many products may be summed in the matrix unit; None is as the compiler likes it, on sm_90 all of them."""
    return min(256, block_k) if x.dtype is not torch.int8 and depth > LONGEST_QUICK_SUM else None


def bind(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    config: Linear8bitConfig,
) -> Callable[..., None]:
    """bound(x, x_scale, weight, weight_scale, bias, residual, y) is `launch` for tensors that lie as these."""
    (M, K), N = x.shape, weight.shape[0]
    tiles = ceil_div(M, config.block_m) * ceil_div(N, config.block_n + config.block_n2)
    constants = {
        "WHOLE": x.dtype is torch.int8, "BY_ROW": int(x_scale.dim() > 0), "BY_COLUMN": int(weight_scale.dim() > 0),
        "HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None, "EVEN_K": K % config.block_k == 0,
        "IMPRECISE": imprecise(x, K, config.block_k),
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_N2": config.block_n2, "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "num_warps": config.warps, "num_stages": config.stages,
    }  # fmt: skip
    residual_stride = 0 if residual is None else residual.stride(0)
    numbers = (M, N, K, x.stride(0), weight.stride(0), residual_stride)
    return Bound(_product_8bit, (tiles,), numbers, constants)


def launch(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    config: Linear8bitConfig,
) -> None:
    """Fill `y`, dense [M, N]; rows of `x`, `weight` and `residual` may be any distance apart."""
    if isinstance(_product_8bit, InterpretedFunction):
        # Triton's interpreter has no sums wider than what it multiplies; in float64 they are exact.
        x, weight = x.to(torch.float64), weight.to(torch.float64)
    bind(x, x_scale, weight, weight_scale, bias, residual, config)(x, x_scale, weight, weight_scale, bias, residual, y)
