"""q * scales = x[..., :F] * gelu(x[..., F:]) in 8 bits: the gate of a transformer's feed-forward before its product.

Each row has a scale of its own, as `linear_8bit` takes it, and is in registers when that is known. Stock is `geglu` and
then `quantize_rows`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rocm_sd.errors import Unsupported, require_one_of
from rocm_sd.kernels import triton
from rocm_sd.kernels.configs.geglu_8bit import Geglu8bitConfig
from rocm_sd.ops.defining import define
from rocm_sd.ops.definition import UP_TO_FLOAT32, Implementation, where
from rocm_sd.ops.eight_bits import LIMITS, multiplied, too_wide
from rocm_sd.ops.geglu import geglu
from rocm_sd.ops.geglu_8bit.workload import TUNING, VERIFICATION
from rocm_sd.ops.layouts import as_rows, rows_in_place
from rocm_sd.ops.quantize_rows import quantize_rows
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


__all__ = ["OP", "geglu_8bit"]

Pair = tuple[torch.Tensor, torch.Tensor]

_WIDEST = 8192  # of a row of results that stays in registers, beside the gates


def geglu_8bit(
    x: torch.Tensor, to: str = "int8", implementation: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scales), q * scales = x[..., :F] * gelu(x[..., F:]) in 8 bits, with the exact GELU (erf).

    x: [..., 2F] of any strides, fp16, bf16, fp32 or fp64; `to`: int8, float8_e4m3fn or float8_e4m3fnuz; q: [..., F],
    dense; scales: [...], float32, as `quantize_rows` has them. It has no gradient. `implementation` names one and never
    falls back; without it the tuning data decides.
    """
    bound = OP.bound(implementation, x, to)
    if bound is not None:
        return bound(x, to)
    require_one_of("to", to, tuple(LIMITS))
    if not x.dim() or not x.shape[-1] or x.shape[-1] % 2:
        raise Unsupported(OP.name, f"x of shape {tuple(x.shape)}: it takes [..., 2F] with F of at least 1")
    return OP.call(x, to, implementation=implementation)


def _allocate(x: Tensor, to: str) -> Pair:
    q = x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=getattr(torch, to))
    return q, x.new_empty(x.shape[:-1], dtype=torch.float32)


def _stock(x: Tensor, to: str) -> Pair:
    """Two ops, each of which chooses for itself."""
    return quantize_rows(geglu(x), to)


def _triton(x: Tensor, to: str, *, config: Geglu8bitConfig) -> Pair:
    q, scales = _allocate(x, to)
    if q.numel():
        filled = q.view(-1, q.shape[-1]), scales.view(-1)
        triton.launch_op("geglu_8bit", x.device, as_rows(x), *filled, LIMITS[to], config)
    return q, scales


def _bind(x: Tensor, to: str, *, config: Geglu8bitConfig) -> Callable[..., Pair] | None:
    rows = rows_in_place(x)
    if rows is None or not x.numel():
        return None
    launch = triton.bind_op("geglu_8bit", rows, LIMITS[to], config)
    if launch is None:
        return None

    def bound(x: Tensor, to: str) -> Pair:
        q, scales = _allocate(x, to)
        launch(x, q, scales)
        return q, scales

    return bound


OP = define(
    geglu_8bit,
    summary="split, exact GELU and multiply of a feed-forward in 8 bits, with a scale for each row, in one pass",
    family="elementwise",
    implementations=(
        Implementation(STOCK, _stock),
        Implementation(
            "triton",
            _triton,
            multiplied(where(triton, UP_TO_FLOAT32, too_wide("f", _WIDEST))),
            default=Geglu8bitConfig(),
            bind=_bind,
        ),
    ),
    allocate=_allocate,
    backward=None,
    results=("q", "scales"),
    verification=VERIFICATION,
    tuning=TUNING,
    composed=True,
)
