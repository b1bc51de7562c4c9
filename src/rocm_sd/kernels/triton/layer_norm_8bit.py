"""total = x + residual; q * scales = layer_norm(total) * weight + bias in 8 bits, x: [M, C], in one pass over memory.

The norm of `layer_norm_residual`, whose row is in registers when it is done: its largest value is one more meeting of
the lanes, and each row has a scale of its own at no pass over memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from rocm_sd.kernels.sizes import ceil_div
from rocm_sd.kernels.triton.bound import Bound
from rocm_sd.kernels.triton.layer_norm_residual import _centred, _inside, _load, chunks_of
from rocm_sd.kernels.triton.quantize_rows import eight_bits_of, in_eight_bits

if TYPE_CHECKING:
    import torch

    from rocm_sd.kernels.configs.layer_norm_8bit import LayerNorm8bitConfig

__all__ = ["bind", "launch", "row_factor"]


@triton.jit
def row_factor(largest, LIMIT: tl.constexpr):
    """What a row is multiplied with, so that its largest value is the limit; 0 for a row of zeros."""
    return tl.where(largest > 0.0, tl.div_rn(LIMIT * 1.0, tl.where(largest > 0.0, largest, 1.0)), 0.0)


@triton.jit
def _layer_norm_8bit(  # noqa: C901, PLR0912 -- branches of a variant that is compiled are gone
    x, residual, weight, bias, q, scales, total, M, C, x_stride, residual_stride, eps,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, LIMIT: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, EVEN_C: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    row = tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, CHUNK)[None, :]
    here = first + row < M
    # 64-bit only in the scalar bases.
    x += first.to(tl.int64) * x_stride
    if HAS_RESIDUAL:
        residual += first.to(tl.int64) * residual_stride
        total += first.to(tl.int64) * C
    q += first.to(tl.int64) * C
    at = row * C + c

    # Every load before the first store, which the compiler may not move them across: they wait for memory together.
    xs = _load(x, row * x_stride + c, here, c, C, CHUNK, CHUNKS, EVEN_C)
    if HAS_RESIDUAL:
        residuals = _load(residual, row * residual_stride + c, here, c, C, CHUNK, CHUNKS, EVEN_C)
    # As wide as the tile, though every row reads the same: in a layout of its own it would go through LDS.
    columns = tl.broadcast_to(c, [ROWS, CHUNK])
    if HAS_WEIGHT:
        weights = _load(weight, columns, here, c, C, CHUNK, CHUNKS, EVEN_C)
    if HAS_BIAS:
        biases = _load(bias, columns, here, c, C, CHUNK, CHUNKS, EVEN_C)

    totals = ()
    # Chunks are added lane by lane, so that lanes meet once.
    added = tl.zeros([ROWS, CHUNK], tl.float32)
    for i in tl.static_range(CHUNKS):
        rounded = xs[i]
        if HAS_RESIDUAL:
            # Rounded and widened again: the norm is that of the total as stock torch has it.
            rounded = (xs[i].to(tl.float32) + residuals[i].to(tl.float32)).to(total.dtype.element_ty)
            tl.store(total + i * CHUNK + at, rounded, mask=_inside(here, c, i, C, CHUNK, EVEN_C))
        totals = totals + (rounded.to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
        added += totals[i]
    # Divided, not times 1 / C: halves of one value have an exact sum, and then their mean is that value.
    mean = tl.div_rn(tl.sum(added, axis=1, keep_dims=True), 1.0 * C)
    shift = 0.0
    if x.dtype.element_ty == tl.float32:
        # A sum of floats is rounded. In a row of one value that would be all of the result, so it is taken off again.
        left = tl.zeros([ROWS, CHUNK], tl.float32)
        for i in tl.static_range(CHUNKS):
            left += _centred(totals[i], mean, shift, c, i, C, CHUNK, EVEN_C)
        shift = tl.div_rn(tl.sum(left, axis=1, keep_dims=True), 1.0 * C)

    squares = tl.zeros([ROWS, CHUNK], tl.float32)
    for i in tl.static_range(CHUNKS):
        centred = _centred(totals[i], mean, shift, c, i, C, CHUNK, EVEN_C)
        squares += centred * centred
    rstd = 1.0 / tl.sqrt(tl.sum(squares, axis=1, keep_dims=True) * (1.0 / C) + eps)

    outs = ()
    largest = tl.zeros([ROWS, CHUNK], tl.float32)
    for i in tl.static_range(CHUNKS):
        # Beyond the row's end it is 0, which no weight or bias makes larger: both are loaded as 0 there.
        out = _centred(totals[i], mean, shift, c, i, C, CHUNK, EVEN_C) * rstd
        if HAS_WEIGHT:
            out *= weights[i].to(tl.float32)
        if HAS_BIAS:
            out += biases[i].to(tl.float32)
        outs = outs + (out,)  # type: ignore[assignment]  # noqa: RUF005
        largest = tl.maximum(largest, tl.abs(out))
    most = tl.max(largest, axis=1, keep_dims=True)
    factor = row_factor(most, LIMIT)
    tl.store(scales + first + row, tl.div_rn(most, LIMIT * 1.0), mask=here)
    for i in tl.static_range(CHUNKS):
        out = in_eight_bits(outs[i], factor, LIMIT, LIMIT == 127)
        tl.store(q + i * CHUNK + at, out.to(q.dtype.element_ty), mask=_inside(here, c, i, C, CHUNK, EVEN_C))


def bind(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    limit: int,
    config: LayerNorm8bitConfig,
) -> Bound:
    """bound(x, residual, weight, bias, q, scales, total) is `launch` for tensors that lie as these."""
    M, C = x.shape
    chunk, chunks = chunks_of(C, config.chunk)
    constants = {
        "HAS_RESIDUAL": residual is not None, "HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None,
        "LIMIT": limit,
        "ROWS": config.rows, "CHUNK": chunk, "CHUNKS": chunks, "EVEN_C": chunk * chunks == C, "num_warps": config.warps,
    }  # fmt: skip
    numbers = (M, C, x.stride(0), 0 if residual is None else residual.stride(0), eps)
    return Bound(_layer_norm_8bit, (ceil_div(M, config.rows),), numbers, constants)


def launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    q: torch.Tensor,
    scales: torch.Tensor,
    total: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    limit: int,
    config: LayerNorm8bitConfig,
) -> None:
    """Fill `q` and `total`, dense [M, C], and `scales`, [M]; rows of `x` and `residual` may be any distance apart.

    Without a residual there is no total.
    """
    bound = bind(x, residual, weight, bias, eps, limit, config)
    with eight_bits_of(_layer_norm_8bit, q) as filled:
        bound(x, residual, weight, bias, filled, scales, total)
