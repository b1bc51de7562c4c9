"""y = h[:, :F] * gelu(h[:, F:]), h = x + bias, x: [M, 2F], in one pass.

GELU is exact (erf), written with one exponential: gelu(g) = max(g, 0) - |g| * Phi(-|g|), and Phi(-a) = 2^-Q(a) with Q a
polynomial: no cancellation and no branch. Compiled by Triton 3.9.0, the whole kernel is 25 instructions an output on
gfx1100 and 31 on gfx942, where with tl.erf it is 68 and 70, and branches besides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from rocm_sd.kernels.sizes import ceil_div, power_of_2
from rocm_sd.kernels.triton.bound import Bound
from rocm_sd.kernels.triton.quantize_rows import eight_bits_of, in_eight_bits

if TYPE_CHECKING:
    import torch

    from rocm_sd.kernels.configs.geglu import GegluConfig

__all__ = ["bind", "launch"]


@triton.jit
def _gelu(g):
    # Q(a) = -log2(Phi(-a)), Q(0) = 1: a minimax fit of degree 11 over 0 <= a <= 9, weighted by max(a * Phi(-a), 3e-4).
    # In float32 gelu is within 4e-8 of the exact value, and within 4e-5 of it relatively, down to g = -9 (-1e-18).
    # Degree 9 is within 1e-7, which float16 does not feel and the float32 gate does.
    # The clamp keeps the fit in its range, and infinity from meeting zero.
    a = tl.minimum(tl.abs(g), 9.0)
    q = -8.493062110628992e-10
    q = q * a + 4.0425198768253275e-08
    q = q * a - 8.279569295664051e-07
    q = q * a + 9.474427464301255e-06
    q = q * a - 6.450466393232702e-05
    q = q * a + 0.0002322398761623642
    q = q * a + 0.00010663146580159469
    q = q * a - 0.0070851572204361285
    q = q * a + 0.05254035240035663
    q = q * a + 0.45918590149636507
    q = q * a + 1.1511086565261195
    # 1 is taken off last, so that 2^-Q(0) is 0.5 to the bit.
    tail = tl.exp2(-1.0 - q * a)
    # Not maximum(g, 0), which drops NaN.
    return tl.where(g < 0.0, 0.0, g) - a * tail


@triton.jit
def _geglu(
    x, bias, scale, y, M, F, x_stride, f_blocks,
    HAS_BIAS: tl.constexpr, LIMIT: tl.constexpr, ROWS: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    # One axis: the second and third of a grid end at 65535 on NVIDIA GPUs.
    program = tl.program_id(0)
    first = (program // f_blocks) * ROWS
    f = (program % f_blocks) * BLOCK_F + tl.arange(0, BLOCK_F)
    row = tl.arange(0, ROWS)[:, None]
    inside = (first + row < M) & (f < F)[None, :]
    # 64-bit only in the scalar bases.
    x += first.to(tl.int64) * x_stride
    y += first.to(tl.int64) * F
    at = row * x_stride + f[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x + F + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        # As wide as the tile, though every row reads the same: in a layout of its own it would go through LDS.
        columns = tl.broadcast_to(f[None, :], [ROWS, BLOCK_F])
        value += tl.load(bias + columns, mask=columns < F, other=0.0).to(tl.float32)
        gate += tl.load(bias + F + columns, mask=columns < F, other=0.0).to(tl.float32)
    value *= _gelu(gate)
    if LIMIT:
        value = in_eight_bits(value, tl.div_rn(1.0, tl.load(scale)), LIMIT, LIMIT == 127)
    tl.store(y + row * F + f[None, :], value.to(y.dtype.element_ty), mask=inside)


def bind(x: torch.Tensor, bias: torch.Tensor | None, limit: int, config: GegluConfig) -> Bound:
    """bound(x, bias, scale, y) is `launch` for tensors that lie as these."""
    M, F = x.shape[0], x.shape[1] // 2
    block_f = min(config.block_f, power_of_2(F))
    f_blocks = ceil_div(F, block_f)
    constants = {
        "HAS_BIAS": bias is not None, "LIMIT": limit,
        "ROWS": config.rows, "BLOCK_F": block_f, "num_warps": config.warps,
    }  # fmt: skip
    return Bound(_geglu, (ceil_div(M, config.rows) * f_blocks,), (M, F, x.stride(0), f_blocks), constants)


def launch(
    x: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    limit: int,
    config: GegluConfig,
) -> None:
    """Fill `y`, dense [M, F]; rows of `x`, [M, 2F], may be any distance apart. With a limit, y is of 8 bits."""
    bound = bind(x, bias, limit, config)
    with eight_bits_of(_geglu, y) as filled:
        bound(x, bias, scale, filled)
