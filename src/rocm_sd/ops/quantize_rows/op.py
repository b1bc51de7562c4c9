"""q * scale = x in 8 bits: what a product in 8 bits takes, with a scale for each row or a given one for all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rocm_sd.errors import Unsupported, require_one_of
from rocm_sd.kernels import triton
from rocm_sd.kernels.configs.quantize_rows import QuantizeRowsConfig
from rocm_sd.ops.defining import define
from rocm_sd.ops.definition import UP_TO_FLOAT32, Implementation, where
from rocm_sd.ops.eight_bits import LIMITS, multiplied, too_wide
from rocm_sd.ops.layouts import as_rows, rows_in_place
from rocm_sd.ops.quantize_rows import reference
from rocm_sd.ops.quantize_rows.workload import TUNING, VERIFICATION
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from rocm_sd.ops.layouts import Part

__all__ = ["OP", "quantize_rows"]

_WIDEST = 16384  # of a row that stays in registers
Pair = tuple[torch.Tensor, torch.Tensor]


def quantize_rows(
    x: torch.Tensor, to: str, scale: torch.Tensor | None = None, implementation: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scales), q * scales = x in 8 bits; x: [..., K] of any strides, fp16, bf16, fp32 or fp64.

    `to`: int8, float8_e4m3fn or float8_e4m3fnuz. q: [..., K], dense; scales: [...], float32. With a `scale`, float32 of
    shape [1], q is x / scale, cut off at the format's largest value, and the scales are empty. It has no gradient.
    `implementation` names one and never falls back; without it the tuning data decides.
    """
    bound = OP.bound(implementation, x, to, scale)
    if bound is not None:
        return bound(x, to, scale)
    require_one_of("to", to, tuple(LIMITS))
    if not x.dim() or not x.shape[-1]:
        raise Unsupported(OP.name, f"x of shape {tuple(x.shape)}: it takes [..., K] with K of at least 1")
    OP.require_shape("scale", scale, (1,))
    if scale is not None and scale.dtype is not torch.float32:
        raise Unsupported(OP.name, f"scale of {scale.dtype}: it takes float32")
    return OP.call(x, to, scale, implementation=implementation)


def _allocate(x: Tensor, to: str, scale: Part) -> Pair:
    shape = x.shape[:-1] if scale is None else (0,)
    return x.new_empty(x.shape, dtype=getattr(torch, to)), x.new_empty(shape, dtype=torch.float32)


def _stock(x: Tensor, to: str, scale: Part) -> Pair:
    q, scales = reference.quantize_rows(x, to, scale)
    return q.contiguous(), scales.contiguous()


def _triton(x: Tensor, to: str, scale: Part, *, config: QuantizeRowsConfig) -> Pair:
    q, scales = _allocate(x, to, scale)
    if q.numel():
        rows, own = q.view(-1, q.shape[-1]), None if scale is not None else scales.view(-1)
        triton.launch_op("quantize_rows", x.device, as_rows(x), scale, rows, own, LIMITS[to], config)
    return q, scales


def _bind(x: Tensor, to: str, scale: Part, *, config: QuantizeRowsConfig) -> Callable[..., Pair] | None:
    rows = rows_in_place(x)
    if rows is None or not x.numel():
        return None
    launch = triton.bind_op("quantize_rows", rows, scale, LIMITS[to], config)
    if launch is None:
        return None

    def bound(x: Tensor, to: str, scale: Part) -> Pair:
        q, scales = _allocate(x, to, scale)
        launch(x, scale, q, None if scale is not None else scales)
        return q, scales

    return bound


OP = define(
    quantize_rows,
    summary="a tensor in 8 bits, with a scale for each row or a given one for all",
    family="elementwise",
    implementations=(
        Implementation(STOCK, _stock),
        Implementation(
            "triton",
            _triton,
            multiplied(where(triton, UP_TO_FLOAT32, too_wide("k", _WIDEST))),
            default=QuantizeRowsConfig(),
            bind=_bind,
        ),
    ),
    allocate=_allocate,
    backward=None,
    results=("q", "scales"),
    verification=VERIFICATION,
    tuning=TUNING,
)
