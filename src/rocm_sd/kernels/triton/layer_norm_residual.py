"""total = x + residual; y = layer_norm(total) * weight + bias, x: [M, C], in one pass over memory. Or of x alone.

A row is held in registers between its passes, the mean and then the centred squares: no cancellation. Its width is
split in equal powers of two, 320 = 5 * 64: a single block of 512 would leave 37% of the lanes idle, and unequal parts
(256 + 64) get unequal layouts, for which Triton sends the larger part through LDS twice. No atomics: the same input
gives the same bits.
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

    from rocm_sd.kernels.configs.layer_norm_residual import LayerNormResidualConfig

__all__ = ["bind", "chunks_of", "launch"]


@triton.jit
def _inside(here, c, i: tl.constexpr, C, CHUNK: tl.constexpr, EVEN_C: tl.constexpr):
    return here if EVEN_C else here & (i * CHUNK + c < C)


@triton.jit
def _load(pointer, at, here, c, C, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, EVEN_C: tl.constexpr):
    """Every chunk of the rows, as a tuple."""
    chunks = ()
    for i in tl.static_range(CHUNKS):
        chunk = tl.load(pointer + i * CHUNK + at, mask=_inside(here, c, i, C, CHUNK, EVEN_C), other=0.0)
        # Triton has no star in a tuple, and mypy no tuple that grows.
        chunks = chunks + (chunk,)  # type: ignore[assignment]  # noqa: RUF005
    return chunks


@triton.jit
def _centred(total, mean, shift, c, i: tl.constexpr, C, CHUNK: tl.constexpr, EVEN_C: tl.constexpr):
    centred = total - mean - shift
    if not EVEN_C:
        centred = tl.where(i * CHUNK + c < C, centred, 0.0)
    return centred


@triton.jit
def _layer_norm_residual(  # noqa: C901, PLR0912 -- branches of a variant that is compiled are gone
    x, residual, weight, bias, scale, y, total, M, C, x_stride, residual_stride, eps,
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
    y += first.to(tl.int64) * C
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

    if LIMIT:
        factor = tl.div_rn(1.0, tl.load(scale))
    for i in tl.static_range(CHUNKS):
        out = (totals[i] - mean - shift) * rstd
        if HAS_WEIGHT:
            out *= weights[i].to(tl.float32)
        if HAS_BIAS:
            out += biases[i].to(tl.float32)
        if LIMIT:
            out = in_eight_bits(out, factor, LIMIT, LIMIT == 127)
        tl.store(y + i * CHUNK + at, out.to(y.dtype.element_ty), mask=_inside(here, c, i, C, CHUNK, EVEN_C))


def chunks_of(width: int, chunk: int) -> tuple[int, int]:
    """Of rows of that width, in chunks of about that size: how wide each is, and how many there are."""
    whole = power_of_2(width)
    # Chunks are unrolled: more than 8 would be a long kernel for a width that nothing was tuned for.
    chunk = min(max(chunk, whole // 8), whole)
    return chunk, ceil_div(width, chunk)


def bind(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    limit: int,
    config: LayerNormResidualConfig,
) -> Bound:
    """bound(x, residual, weight, bias, scale, y, total) is `launch` for tensors that lie as these."""
    M, C = x.shape
    chunk, chunks = chunks_of(C, config.chunk)
    constants = {
        "HAS_RESIDUAL": residual is not None, "HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None,
        "LIMIT": limit,
        "ROWS": config.rows, "CHUNK": chunk, "CHUNKS": chunks, "EVEN_C": chunk * chunks == C, "num_warps": config.warps,
    }  # fmt: skip
    numbers = (M, C, x.stride(0), 0 if residual is None else residual.stride(0), eps)
    return Bound(_layer_norm_residual, (ceil_div(M, config.rows),), numbers, constants)


def launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    total: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    scale: torch.Tensor | None,
    limit: int,
    config: LayerNormResidualConfig,
) -> None:
    """Fill `y` and `total`, dense [M, C]; rows of `x` and `residual`, [M, C], may be any distance apart.

    Without a residual there is no total. With a limit, y is of 8 bits, with that scale.
    """
    bound = bind(x, residual, weight, bias, eps, limit, config)
    with eight_bits_of(_layer_norm_residual, y) as filled:
        bound(x, residual, weight, bias, scale, filled, total)
