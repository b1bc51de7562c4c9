"""The smallest Triton kernels that tell whether Triton works: a sum, and a product of bfloat16 matrices.

Importing this needs Triton: only the probe's own process does.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["add", "multiply"]


# Triton has no types.
@triton.jit  # type: ignore[untyped-decorator]
def add(x, y, result, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """result = x + y; vectors of `count`."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    tl.store(result + index, tl.load(x + index, mask=inside) + tl.load(y + index, mask=inside), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def multiply(x, y, result, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """result = x @ y; [SIZE, SIZE] each, the result in float32."""
    row = tl.arange(0, SIZE)[:, None] * SIZE
    column = tl.arange(0, SIZE)[None, :]
    tl.store(result + row + column, tl.dot(tl.load(x + row + column), tl.load(y + row + column)))
