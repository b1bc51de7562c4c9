"""total = x + residual; y = layer_norm(total): the norms of a transformer block, with the adds before them.

It adds, rounds as stock does, normalises, and returns both. Without a residual it is LayerNorm alone, as at the
beginning of every transformer.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from rocm_sd.errors import Unsupported
from rocm_sd.kernels import hip, triton
from rocm_sd.kernels.configs.layer_norm_residual import LayerNormResidualConfig
from rocm_sd.kernels.hip.layer_norm_residual import LayerNormResidualConfig as HipConfig
from rocm_sd.ops.defining import Saved, define
from rocm_sd.ops.definition import UP_TO_FLOAT32, Implementation, where
from rocm_sd.ops.eight_bits import dtype_of, limit_of, multiplied, require_eight_bits
from rocm_sd.ops.layer_norm_residual.workload import HIP, TUNING, VERIFICATION
from rocm_sd.ops.layouts import as_dtype, as_rows, dense, is_dense, rows_in_place
from rocm_sd.ops.quantize_rows.reference import quantize_rows as quantized
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from torch import Tensor

    from rocm_sd.ops.layouts import Part
    from rocm_sd.tuning import Problem

__all__ = ["OP", "layer_norm_residual"]

Pair = tuple[torch.Tensor, torch.Tensor]

# A row stays in registers: 32 warps hold this many values, 16 a lane.
_WIDEST = 16384
# 1024 lanes hold this many, 8 a lane, also where no access is wider than one value.
_WIDEST_HIP = 8192


def layer_norm_residual(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    scale: torch.Tensor | None = None,
    to: str | None = None,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """total = x + residual; y = layer_norm(total) * weight + bias over the last dimension; returns (y, total).

    x, residual: [..., C] of any strides and one dtype, fp16, bf16, fp32 or fp64; weight, bias: [C]; y and total are
    dense and of x's dtype. Without a residual the total is x itself. With `to` (int8, float8_e4m3fn or
    float8_e4m3fnuz) and a scale, float32 of shape [1], y is rounded to 8 bits as `quantize_rows` does, and has no
    gradient. `implementation` names one and never falls back; without it the tuning data decides.
    """
    rounding = () if to is None else (scale, to)
    bound = OP.bound(implementation, x, residual, weight, bias, eps, *rounding)
    if bound is not None:
        return bound(x, residual, weight, bias, eps, *rounding)
    if not x.dim() or not x.shape[-1]:
        raise Unsupported(OP.name, f"x of shape {tuple(x.shape)}: it takes [..., C] with C of at least 1")
    OP.require_shape("residual", residual, x.shape)
    OP.require_shape("weight", weight, x.shape[-1:])
    OP.require_shape("bias", bias, x.shape[-1:])
    require_eight_bits(OP.name, scale, to, x, residual, weight, bias)
    if residual is None and not OP.at_once(x, None, weight, bias, eps, *rounding):
        # An operator of torch may not return what it was given. LayerNorm alone is one already, and differentiable.
        return _stock(x, None, weight, bias, eps, scale, to)
    return OP.call(x, residual, weight, bias, eps, *rounding, implementation=implementation)


def _allocate(x: Tensor, to: str | None) -> Pair:
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    return torch.empty_like(total, dtype=dtype_of(x, to)), total


def _stock(
    x: Tensor, residual: Part, weight: Part, bias: Part, eps: float, scale: Part = None, to: str | None = None
) -> Pair:
    total = x if residual is None else (x + residual).contiguous()
    y = F.layer_norm(total, total.shape[-1:], as_dtype(weight, x.dtype), as_dtype(bias, x.dtype), eps)
    return y.contiguous() if to is None else quantized(y, to, scale)[0].contiguous(), total


def _by_kernel(
    language: ModuleType,
    x: Tensor,
    residual: Part,
    weight: Part,
    bias: Part,
    eps: float,
    scale: Part = None,
    to: str | None = None,
    *,
    config: LayerNormResidualConfig | HipConfig,
) -> Pair:
    y, total = _results(x, residual, to)
    if x.numel():
        # Kernels in HIP take all in one dtype, and have no result of 8 bits.
        dtype = x.dtype if language is hip else None
        rounding = () if language is hip else (scale, limit_of(to))
        given = (*_as_rows(x, residual, y, total), dense(weight, dtype), dense(bias, dtype), eps, *rounding, config)
        language.launch_op("layer_norm_residual", x.device, *given)
    return y, total


def _bind(
    x: Tensor,
    residual: Part,
    weight: Part,
    bias: Part,
    eps: float,
    _scale: Part = None,
    to: str | None = None,
    *,
    config: LayerNormResidualConfig,
) -> Callable[..., Pair] | None:
    rows, added = rows_in_place(x), None if residual is None else rows_in_place(residual)
    if rows is None or not x.numel() or not is_dense(weight, bias) or (residual is not None and added is None):
        return None
    launch = triton.bind_op("layer_norm_residual", rows, added, weight, bias, eps, limit_of(to), config)
    if launch is None:
        return None

    def bound(
        x: Tensor, residual: Part, weight: Part, bias: Part, _eps: float, scale: Part = None, _to: str | None = None
    ) -> Pair:
        y, total = _results(x, residual, to)
        launch(x, residual, weight, bias, scale, y, None if residual is None else total)
        return y, total

    return bound


def _results(x: Tensor, residual: Part, to: str | None) -> Pair:
    """`_allocate`, where there is a residual."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format, dtype=dtype_of(x, to))
    return y, x if residual is None else torch.empty_like(y, dtype=x.dtype)


def _as_rows(x: Tensor, residual: Part, y: Tensor, total: Tensor) -> tuple[Tensor, Part, Tensor, Part]:
    C = x.shape[-1]
    added, sums = (None, None) if residual is None else (as_rows(residual), total.view(-1, C))
    return as_rows(x), added, y.view(-1, C), sums


def _too_wide(problem: Problem) -> str | None:
    if int(problem["c"]) > _WIDEST:
        return f"rows of {problem['c']} values: a row of more than {_WIDEST} does not stay in registers"
    return None


def _not_for_hip(problem: Problem) -> str | None:
    if problem.get("to"):
        return f"a result of {problem['to']}"
    if int(problem["c"]) > _WIDEST_HIP:
        return f"rows of {problem['c']} values: a row of more than {_WIDEST_HIP} may not stay in registers"
    return None


def _backward(saved: Saved, grad_y: Tensor, grad_total: Tensor) -> Mapping[str, Part]:
    """Mean and spread anew from `total`, then the closed form, in float32 or wider; `total` passes its gradient on."""
    total, weight = saved.total, saved.weight
    wide = torch.promote_types(total.dtype, torch.float32)
    C = total.shape[-1]
    variance, mean = torch.var_mean(total.to(wide), dim=-1, correction=0, keepdim=True)
    rstd = (variance + saved.eps).rsqrt()
    normal = (total.to(wide) - mean) * rstd
    d_affine = grad_y.to(wide)
    d_normal = d_affine if weight is None else d_affine * weight.to(wide)
    centred = d_normal - d_normal.mean(dim=-1, keepdim=True)
    d_total = rstd * (centred - normal * (d_normal * normal).mean(dim=-1, keepdim=True))
    d_x = d_total + grad_total.to(wide)
    return {
        "x": d_x,
        "residual": d_x,
        "weight": (d_affine * normal).reshape(-1, C).sum(dim=0) if "weight" in saved.wanted else None,
        "bias": d_affine.reshape(-1, C).sum(dim=0) if "bias" in saved.wanted else None,
    }


OP = define(
    layer_norm_residual,
    summary="residual add and LayerNorm in one pass; returns both",
    family="norm",
    implementations=(
        Implementation(STOCK, _stock),
        Implementation(
            "triton",
            partial(_by_kernel, triton),
            multiplied(where(triton, UP_TO_FLOAT32, _too_wide)),
            default=LayerNormResidualConfig(),
            bind=_bind,
        ),
        Implementation(
            "hip", partial(_by_kernel, hip), where(hip, UP_TO_FLOAT32, _not_for_hip), HIP, default=HipConfig()
        ),
    ),
    allocate=_allocate,
    backward=_backward,
    same_dtype=("residual",),
    results=("y", "total"),
    saves=("total", "weight"),
    verification=VERIFICATION,
    tuning=TUNING,
)
