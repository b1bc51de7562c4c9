"""A kernel with two results, each in rows that lie some way apart."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def double_and_negate(x, double, negated, row_stride, COLUMNS: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, COLUMNS)
    value = tl.load(x + row * COLUMNS + at)
    tl.store(double + row * row_stride + at, 2 * value)
    tl.store(negated + row * row_stride + at, -value)
