"""y = (x @ weight[:F].T + bias[:F]) * gelu(x @ weight[F:].T + bias[F:]), x: [M, K], weight: [2F, K], y: [M, F].

Each program multiplies a tile of x with the same columns of both halves and keeps both sums in registers, so that the
[M, 2F] between product and gate is never in memory. Accumulation, bias and GELU (exact, as in `geglu`) are float32; y
is rounded once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from rocm_sd.kernels.sizes import ceil_div
from rocm_sd.kernels.triton.bound import Bound
from rocm_sd.kernels.triton.geglu import _gelu

if TYPE_CHECKING:
    import torch

    from rocm_sd.kernels.configs.linear_geglu import LinearGegluConfig

__all__ = ["bind", "launch"]


@triton.jit
def _linear_geglu(
    x, weight, bias, y, M, F, K, x_stride, weight_stride,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    # Tiles in bands of GROUP_M rows: programs that run at once share rows of x and of weight in the L2 cache.
    program = tl.program_id(0)
    m_tiles, n_tiles = tl.cdiv(M, BLOCK_M), tl.cdiv(F, BLOCK_N)
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
    weight_at = tl.minimum(n, F - 1 - first_n)[None, :] * weight_stride + k[:, None]
    # 64-bit only in the scalar bases.
    x += first_m.to(tl.int64) * x_stride
    gate_weight = weight + (first_n.to(tl.int64) + F) * weight_stride
    weight += first_n.to(tl.int64) * weight_stride

    value = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            left = tl.load(x + x_at)
            for_value = tl.load(weight + weight_at)
            for_gate = tl.load(gate_weight + weight_at)
        else:
            inside = start + k < K
            left = tl.load(x + x_at, mask=inside[None, :], other=0.0)
            for_value = tl.load(weight + weight_at, mask=inside[:, None], other=0.0)
            for_gate = tl.load(gate_weight + weight_at, mask=inside[:, None], other=0.0)
        value = tl.dot(left, for_value, value)
        gate = tl.dot(left, for_gate, gate)
        x += BLOCK_K
        weight += BLOCK_K
        gate_weight += BLOCK_K

    if HAS_BIAS:
        inside = first_n + n < F
        value += tl.load(bias + first_n + n, mask=inside, other=0.0).to(tl.float32)[None, :]
        gate += tl.load(bias + F + first_n + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    y += first_m.to(tl.int64) * F + first_n
    inside = (first_m + m < M)[:, None] & (first_n + n < F)[None, :]
    tl.store(y + m[:, None] * F + n[None, :], (value * _gelu(gate)).to(y.dtype.element_ty), mask=inside)


def bind(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: LinearGegluConfig) -> Bound:
    """bound(x, weight, bias, y) is `launch` for tensors that lie as these."""
    (M, K), F = x.shape, weight.shape[0] // 2
    tiles = ceil_div(M, config.block_m) * ceil_div(F, config.block_n)
    constants = {
        "HAS_BIAS": bias is not None, "EVEN_K": K % config.block_k == 0,
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP_M": config.group_m,
        "num_warps": config.warps, "num_stages": config.stages,
    }  # fmt: skip
    return Bound(_linear_geglu, (tiles,), (M, F, K, x.stride(0), weight.stride(0)), constants)


def launch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor, config: LinearGegluConfig
) -> None:
    """Fill `y`, dense [M, F]; rows of `x` and `weight` may be any distance apart."""
    if isinstance(_linear_geglu, InterpretedFunction):
        # Triton's interpreter multiplies bfloat16 matrices as if their bits were integers; in float32 they are exact.
        x, weight = x.float(), weight.float()
    bind(x, weight, bias, config)(x, weight, bias, y)
