"""q * scales = x[:, :F] * gelu(x[:, F:]) in 8 bits, x: [M, 2F], in one pass over memory.

The gate of `geglu`, by programs that have whole rows: what a row's values are divided by is known when the last one is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from rocm_sd.kernels.sizes import ceil_div
from rocm_sd.kernels.triton.bound import Bound
from rocm_sd.kernels.triton.geglu import _gelu
from rocm_sd.kernels.triton.layer_norm_8bit import row_factor
from rocm_sd.kernels.triton.layer_norm_residual import _inside, _load, chunks_of
from rocm_sd.kernels.triton.quantize_rows import eight_bits_of, in_eight_bits

if TYPE_CHECKING:
    import torch

    from rocm_sd.kernels.configs.geglu_8bit import Geglu8bitConfig

__all__ = ["bind", "launch"]


@triton.jit
def _geglu_8bit(
    x, q, scales, M, F, x_stride,
    LIMIT: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, EVEN_F: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    row = tl.arange(0, ROWS)[:, None]
    f = tl.arange(0, CHUNK)[None, :]
    here = first + row < M
    # 64-bit only in the scalar bases.
    x += first.to(tl.int64) * x_stride
    q += first.to(tl.int64) * F
    values = _load(x, row * x_stride + f, here, f, F, CHUNK, CHUNKS, EVEN_F)
    gates = _load(x + F, row * x_stride + f, here, f, F, CHUNK, CHUNKS, EVEN_F)
    outs = ()
    # Chunks meet lane by lane, so that lanes meet once.
    largest = tl.zeros([ROWS, CHUNK], tl.float32)
    for i in tl.static_range(CHUNKS):
        outs = outs + (values[i].to(tl.float32) * _gelu(gates[i].to(tl.float32)),)  # type: ignore[assignment]  # noqa: RUF005
        largest = tl.maximum(largest, tl.abs(outs[i]))
    most = tl.max(largest, axis=1, keep_dims=True)
    factor = row_factor(most, LIMIT)
    tl.store(scales + first + row, tl.div_rn(most, LIMIT * 1.0), mask=here)
    for i in tl.static_range(CHUNKS):
        out = in_eight_bits(outs[i], factor, LIMIT, LIMIT == 127)
        inside = _inside(here, f, i, F, CHUNK, EVEN_F)
        tl.store(q + i * CHUNK + row * F + f, out.to(q.dtype.element_ty), mask=inside)


def bind(x: torch.Tensor, limit: int, config: Geglu8bitConfig) -> Bound:
    """bound(x, q, scales) is `launch` for tensors that lie as these."""
    M, F = x.shape[0], x.shape[1] // 2
    chunk, chunks = chunks_of(F, config.chunk)
    constants = {
        "LIMIT": limit, "ROWS": config.rows, "CHUNK": chunk, "CHUNKS": chunks, "EVEN_F": chunk * chunks == F,
        "num_warps": config.warps,
    }  # fmt: skip
    return Bound(_geglu_8bit, (ceil_div(M, config.rows),), (M, F, x.stride(0)), constants)


def launch(x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor, limit: int, config: Geglu8bitConfig) -> None:
    """Fill `q`, dense [M, F], and `scales`, [M]; rows of `x`, [M, 2F], may be any distance apart."""
    bound = bind(x, limit, config)
    with eight_bits_of(_geglu_8bit, q) as filled:
        bound(x, filled, scales)
