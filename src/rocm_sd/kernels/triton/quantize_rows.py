"""q = x / scale in 8 bits, scale = max|x| / limit of each row, x: [M, K]; a row stays in registers between the two.

A value is multiplied by limit / max|x|, which is rounded once, and rounded to the nearest, ties to even. A row of zeros
has scale 0. Whoever gives a scale has it used for all rows; what is beyond the limit is cut off there.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from rocm_sd.kernels.sizes import power_of_2
from rocm_sd.kernels.triton.bound import Bound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rocm_sd.kernels.configs.quantize_rows import QuantizeRowsConfig

__all__ = ["bind", "eight_bits_of", "in_eight_bits", "launch"]

# 1.5 * 2^23: the sum with it has no digits after the point, rounded to the nearest and ties to even.
_TO_WHOLE = tl.constexpr(12582912.0)


@triton.jit
def in_eight_bits(value, factor, LIMIT: tl.constexpr, WHOLE: tl.constexpr):
    """value * factor, cut off at the limit; as whole numbers for int8, which conversion would cut."""
    value = tl.minimum(tl.maximum(value * factor, -LIMIT * 1.0), LIMIT * 1.0)
    if WHOLE:
        value = (value + _TO_WHOLE) - _TO_WHOLE
    return value


@triton.jit
def _quantize_rows(
    x, given, q, scale, K, x_stride,
    LIMIT: tl.constexpr, WHOLE: tl.constexpr, GIVEN: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    value = tl.load(x + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    if GIVEN:
        factor = tl.div_rn(1.0, tl.load(given))
    else:
        largest = tl.max(tl.abs(value), 0)
        factor = tl.where(largest > 0.0, tl.div_rn(LIMIT * 1.0, tl.where(largest > 0.0, largest, 1.0)), 0.0)
        tl.store(scale + row, tl.div_rn(largest, LIMIT * 1.0))
    value = in_eight_bits(value, factor, LIMIT, WHOLE)
    tl.store(q + row * K + k, value.to(q.dtype.element_ty), mask=k < K)


def bind(x: torch.Tensor, given: torch.Tensor | None, limit: int, config: QuantizeRowsConfig) -> Callable[..., None]:
    """bound(x, given, q, scale) is `launch` for tensors that lie as these."""
    M, K = x.shape
    constants = {
        "LIMIT": limit, "WHOLE": limit == 127, "GIVEN": given is not None,
        "BLOCK_K": power_of_2(K), "num_warps": config.warps,
    }  # fmt: skip
    return Bound(_quantize_rows, (M,), (K, x.stride(0)), constants)


def launch(
    x: torch.Tensor,
    given: torch.Tensor | None,
    q: torch.Tensor,
    scale: torch.Tensor | None,
    limit: int,
    config: QuantizeRowsConfig,
) -> None:
    """Fill `q`, dense [M, K], and `scale`, [M], where none is given; rows of `x` may be any distance apart."""
    with eight_bits_of(_quantize_rows, q) as filled:
        bind(x, given, limit, config)(x, given, filled, scale)


@contextmanager
def eight_bits_of(kernel: object, q: torch.Tensor) -> Iterator[torch.Tensor]:
    """What a kernel fills in q's place: Triton's interpreter cuts digits off where it is to round to fp8."""
    if not isinstance(kernel, InterpretedFunction) or not q.is_floating_point() or q.element_size() > 1:
        yield q
        return
    wide = torch.empty_like(q, dtype=torch.float32)
    yield wide
    q.copy_(wide)
