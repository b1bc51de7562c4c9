"""y = h[:, :F] * gelu(h[:, F:]), h = x + bias, x: [M, 2F], in one pass.

GELU is exact (erf), written with one exponential: gelu(g) = max(g, 0) - |g| * Phi(-|g|), and Phi(-a) = 2^-Q(a) with Q a
polynomial. No cancellation, no branch, and about half the instructions of a library's erf, which alone would take as
long as the memory: 30 instructions for each of 10 million elements are 11 us of an H200, their bytes 15 us.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["GegluConfig", "launch"]


@dataclass(frozen=True)
class GegluConfig:
    """A tile of `rows` x `block_f` outputs for `warps`."""

    block_f: int
    rows: int
    warps: int

    @classmethod
    def from_mapping(cls, values: Mapping[str, int]) -> GegluConfig:
        return cls(**values)


@triton.jit
def _gelu(g):
    # Q(a) = -log2(Phi(-a)), Q(0) = 1: the minimax fit of degree 9 over 0 <= a <= 9, weighted by a * Phi(-a) + 3e-4. In
    # float32 gelu is within 1e-7 of the exact value, and within 3e-4 of it relatively, down to g = -9 (-1e-18).
    # The clamp keeps the fit in its range, and infinity from meeting zero.
    a = tl.minimum(tl.abs(g), 9.0)
    q = -2.4706444015206315e-08
    q = q * a + 7.945811180154547e-07
    q = q * a - 8.765856022016178e-06
    q = q * a + 1.3360664457234596e-05
    q = q * a + 6.306545261197302e-04
    q = q * a - 7.830177956738404e-03
    q = q * a + 5.3134201709145505e-02
    q = q * a + 4.5895042071606845e-01
    q = q * a + 1.1511429953592542
    # 1 is taken off last, so that 2^-Q(0) is 0.5 to the bit.
    tail = tl.exp2(-1.0 - q * a)
    # Not maximum(g, 0), which drops NaN.
    return tl.where(g < 0.0, 0.0, g) - a * tail


@triton.jit
def _geglu(
    x, bias, y, M, F, x_stride, f_blocks,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK_F: tl.constexpr,
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
    tl.store(y + row * F + f[None, :], (value * _gelu(gate)).to(y.dtype.element_ty), mask=inside)


def launch(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None, config: GegluConfig) -> None:
    """Fill `y`, dense [M, F]; rows of `x`, [M, 2F], may be any distance apart."""
    M, F = y.shape
    block_f = min(config.block_f, triton.next_power_of_2(F))
    f_blocks = triton.cdiv(F, block_f)
    _geglu[(triton.cdiv(M, config.rows) * f_blocks,)](
        x, bias, y, M, F, x.stride(0), f_blocks,
        HAS_BIAS=bias is not None, ROWS=config.rows, BLOCK_F=block_f, num_warps=config.warps,
    )  # fmt: skip
