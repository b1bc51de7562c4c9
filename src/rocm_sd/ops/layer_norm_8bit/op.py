"""total = x + residual; q * scales = layer_norm(total) in 8 bits: the norms of a transformer block before its products.

Each row has a scale of its own, as `linear_8bit` takes it, and is in registers when that is known. Stock is
`layer_norm_residual` and then `quantize_rows`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rocm_sd.errors import Unsupported, require_one_of
from rocm_sd.kernels import triton
from rocm_sd.kernels.configs.layer_norm_8bit import LayerNorm8bitConfig
from rocm_sd.ops.defining import define
from rocm_sd.ops.definition import UP_TO_FLOAT32, Implementation, where
from rocm_sd.ops.eight_bits import LIMITS, multiplied, too_wide
from rocm_sd.ops.layer_norm_8bit.workload import TUNING, VERIFICATION
from rocm_sd.ops.layer_norm_residual import layer_norm_residual
from rocm_sd.ops.layouts import as_rows, dense, is_dense, rows_in_place
from rocm_sd.ops.quantize_rows import quantize_rows
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from rocm_sd.ops.layouts import Part

__all__ = ["OP", "layer_norm_8bit"]

Rounded = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_WIDEST = 16384  # of a row that stays in registers


def layer_norm_8bit(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    to: str = "int8",
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """total = x + residual; q * scales = layer_norm(total) * weight + bias in 8 bits; returns (q, scales, total).

    x, residual: [..., C] of any strides and one dtype, fp16, bf16, fp32 or fp64; weight, bias: [C]; `to`: int8,
    float8_e4m3fn or float8_e4m3fnuz; q: [..., C] and total, of x's dtype, are dense; scales: [...], float32, as
    `quantize_rows` has them. Without a residual the total is x itself. It has no gradient. `implementation` names one
    and never falls back; without it the tuning data decides.
    """
    given = x, residual, weight, bias, eps, to
    bound = OP.bound(implementation, *given)
    if bound is not None:
        return bound(*given)
    require_one_of("to", to, tuple(LIMITS))
    if not x.dim() or not x.shape[-1]:
        raise Unsupported(OP.name, f"x of shape {tuple(x.shape)}: it takes [..., C] with C of at least 1")
    OP.require_shape("residual", residual, x.shape)
    OP.require_shape("weight", weight, x.shape[-1:])
    OP.require_shape("bias", bias, x.shape[-1:])
    if residual is None and not OP.at_once(*given):
        # An operator of torch may not return what it was given.
        return _stock(*given)
    return OP.call(*given, implementation=implementation)


def _allocate(x: Tensor, to: str) -> Rounded:
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    scales = x.new_empty(x.shape[:-1], dtype=torch.float32)
    return torch.empty_like(total, dtype=getattr(torch, to)), scales, total


def _stock(x: Tensor, residual: Part, weight: Part, bias: Part, eps: float, to: str) -> Rounded:
    """Two ops, each of which chooses for itself."""
    y, total = layer_norm_residual(x, residual, weight, bias, eps)
    return *quantize_rows(y, to), total


def _triton(
    x: Tensor, residual: Part, weight: Part, bias: Part, eps: float, to: str, *, config: LayerNorm8bitConfig
) -> Rounded:
    q, scales, total = _results(x, residual, to)
    if x.numel():
        C = x.shape[-1]
        added, sums = (None, None) if residual is None else (as_rows(residual), total.view(-1, C))
        filled = q.view(-1, C), scales.view(-1), sums
        given = (as_rows(x), added, *filled, dense(weight), dense(bias), eps, LIMITS[to], config)
        triton.launch_op("layer_norm_8bit", x.device, *given)
    return q, scales, total


def _bind(
    x: Tensor, residual: Part, weight: Part, bias: Part, eps: float, to: str, *, config: LayerNorm8bitConfig
) -> Callable[..., Rounded] | None:
    rows, added = rows_in_place(x), None if residual is None else rows_in_place(residual)
    if rows is None or not x.numel() or not is_dense(weight, bias) or (residual is not None and added is None):
        return None
    launch = triton.bind_op("layer_norm_8bit", rows, added, weight, bias, eps, LIMITS[to], config)
    if launch is None:
        return None

    def bound(x: Tensor, residual: Part, weight: Part, bias: Part, _eps: float, to: str) -> Rounded:
        q, scales, total = _results(x, residual, to)
        launch(x, residual, weight, bias, q, scales, None if residual is None else total)
        return q, scales, total

    return bound


def _results(x: Tensor, residual: Part, to: str) -> Rounded:
    """`_allocate`, where there is a residual."""
    q = torch.empty_like(x, memory_format=torch.contiguous_format, dtype=getattr(torch, to))
    scales = x.new_empty(x.shape[:-1], dtype=torch.float32)
    return q, scales, x if residual is None else torch.empty_like(q, dtype=x.dtype)


OP = define(
    layer_norm_8bit,
    summary="residual add and LayerNorm in 8 bits, with a scale for each row, in one pass; returns the total, too",
    family="norm",
    implementations=(
        Implementation(STOCK, _stock),
        Implementation(
            "triton",
            _triton,
            multiplied(where(triton, UP_TO_FLOAT32, too_wide("c", _WIDEST))),
            default=LayerNorm8bitConfig(),
            bind=_bind,
        ),
    ),
    allocate=_allocate,
    backward=None,
    same_dtype=("residual",),
    results=("q", "scales", "total"),
    verification=VERIFICATION,
    tuning=TUNING,
    composed=True,
)
