"""y = (x * x_scale) @ (weight * weight_scale).T + bias + residual, of x and weight in 8 bits.

The product of two int8 or two fp8 matrices, with the scales of both in its epilogue: W8A8.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from rocm_sd.errors import Unsupported, require_one_of
from rocm_sd.kernels import triton
from rocm_sd.kernels.configs.linear_8bit import LONGEST_QUICK_SUM, Linear8bitConfig
from rocm_sd.ops.defining import define
from rocm_sd.ops.definition import UP_TO_FLOAT32, Implementation, where
from rocm_sd.ops.eight_bits import DTYPES, FORMATS, multiplied
from rocm_sd.ops.layouts import as_rows, dense, is_dense, rows_in_place
from rocm_sd.ops.linear_8bit.workload import TUNING, VERIFICATION
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from rocm_sd.ops.layouts import Part
    from rocm_sd.tuning import Problem

__all__ = ["OP", "linear_8bit"]


def linear_8bit(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    dtype: str = "float16",
    implementation: str | None = None,
) -> torch.Tensor:
    """y = (x * x_scale) @ (weight * weight_scale).T + bias + residual.

    x: [..., K] of any strides and weight: [N, K], both int8, float8_e4m3fn or float8_e4m3fnuz; x_scale: [...] and
    weight_scale: [N], float32, or without dimensions one for all; bias: [N]; residual: [..., N]; y: [..., N], dense, of
    `dtype`. It has no gradient. `implementation` names one and never falls back; without it the tuning data decides.
    """
    bound = OP.bound(implementation, x, x_scale, weight, weight_scale, bias, residual, dtype)
    if bound is not None:
        return bound(x, x_scale, weight, weight_scale, bias, residual, dtype)
    require_one_of("dtype", dtype, DTYPES)
    if not x.dim() or not x.shape[-1]:
        raise Unsupported(OP.name, f"x of shape {tuple(x.shape)}: it takes [..., K] with K of at least 1")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or not weight.shape[0]:
        raise Unsupported(OP.name, f"weight of shape {tuple(weight.shape)}: it takes [N, {x.shape[-1]}]")
    for name, scale, shape in (("x_scale", x_scale, x.shape[:-1]), ("weight_scale", weight_scale, weight.shape[:1])):
        if scale.dtype is not torch.float32:
            raise Unsupported(OP.name, f"{name} of {scale.dtype}: it takes float32")
        if scale.dim():
            OP.require_shape(name, scale, shape)
    OP.require_shape("bias", bias, weight.shape[:1])
    OP.require_shape("residual", residual, (*x.shape[:-1], weight.shape[0]))
    return OP.call(x, x_scale, weight, weight_scale, bias, residual, dtype, implementation=implementation)


def _allocate(x: Tensor, weight: Tensor, dtype: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=getattr(torch, dtype))


def _stock(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Part, residual: Part, dtype: str
) -> Tensor:
    """Both as they were before 8 bits, multiplied in `dtype`."""
    wide: torch.dtype = getattr(torch, dtype)
    left = x.to(torch.float32) * (x_scale.unsqueeze(-1) if x_scale.dim() else x_scale)
    right = weight.to(torch.float32) * (weight_scale.unsqueeze(-1) if weight_scale.dim() else weight_scale)
    y = F.linear(left.to(wide), right.to(wide), None if bias is None else bias.to(wide))
    return (y if residual is None else y + residual.to(wide)).contiguous()


def _scaled_mm(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Part, residual: Part, dtype: str
) -> Tensor:
    """torch's product of fp8: with one scale for all where both have one, which is the faster."""
    rows, wide = as_rows(x), getattr(torch, dtype)
    if x_scale.dim() or weight_scale.dim():
        left = x_scale.reshape(-1, 1) if x_scale.dim() else x_scale.expand(rows.shape[0], 1).contiguous()
        right = (weight_scale if weight_scale.dim() else weight_scale.expand(weight.shape[0])).reshape(1, -1)
        scales = left.contiguous(), right.contiguous()
    else:
        scales = x_scale, weight_scale
    y = torch._scaled_mm(  # noqa: SLF001 -- torch has no other name for it that each version has
        rows.contiguous(),
        weight.contiguous().t(),
        scale_a=scales[0],
        scale_b=scales[1],
        bias=None if bias is None else bias.to(wide),
        out_dtype=wide,
        use_fast_accum=x.shape[-1] <= LONGEST_QUICK_SUM,
    ).view(*x.shape[:-1], weight.shape[0])
    return y if residual is None else y.add_(residual)


def _scaled_mm_why_not(problem: Problem, device: torch.device) -> str | None:
    if problem["dtype"] not in ("float16", "bfloat16"):
        return f"dtype {problem['dtype']}"
    if problem["of"] == "int8":
        return "a product of int8"
    if int(problem["n"]) % 16 or int(problem["k"]) % 16 or not int(problem["m"]):
        return f"{problem['n']} columns of {problem['k']} values: they come in sixteens"
    return _refused(device, str(problem["of"]), str(problem["dtype"]), bool(problem["by_row"] or problem["by_column"]))


@cache
def _refused(device: torch.device, of: str, dtype: str, several: bool) -> str | None:
    """What torch says to a small product of that kind, which hangs on its version, its build and the card."""
    if device.type != "cuda":
        return f"torch has no product of fp8 on {device.type}"
    one = torch.ones(32, 32, device=device).to(getattr(torch, of))
    scale = torch.ones(32 if several else (), device=device)
    try:
        _scaled_mm(one, scale, one, scale, torch.ones(32, device=device), None, dtype)
    except RuntimeError as error:
        return f"torch refuses it ({str(error).splitlines()[0][:160]})"
    return None


def _triton(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Part,
    residual: Part,
    dtype: str,
    *,
    config: Linear8bitConfig,
) -> Tensor:
    y = _allocate(x, weight, dtype)
    if y.numel():
        added, rows = None if residual is None else as_rows(residual), y.view(-1, y.shape[-1])
        scales = [scale.reshape(-1).contiguous() if scale.dim() else scale for scale in (x_scale, weight_scale)]
        given = (as_rows(x), scales[0], as_rows(weight), scales[1], dense(bias), added, rows, config)
        triton.launch_op("linear_8bit", x.device, *given)
    return y


def _bind(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Part,
    residual: Part,
    dtype: str,
    *,
    config: Linear8bitConfig,
) -> Callable[..., Tensor] | None:
    rows, columns = rows_in_place(x), rows_in_place(weight)
    added = None if residual is None else rows_in_place(residual)
    if rows is None or columns is None or not x.numel() or not is_dense(bias, x_scale, weight_scale):
        return None
    if residual is not None and added is None:
        return None
    launch = triton.bind_op("linear_8bit", rows, x_scale, columns, weight_scale, bias, added, config)
    if launch is None:
        return None

    def bound(
        x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Part, residual: Part, _dtype: str
    ) -> Tensor:
        y = _allocate(x, weight, dtype)
        launch(x, x_scale, weight, weight_scale, bias, residual, y)
        return y

    return bound


OP = define(
    linear_8bit,
    summary="product of int8 or fp8 matrices, with scales, bias and residual in its epilogue (W8A8)",
    family="GEMM",
    implementations=(
        Implementation(STOCK, _stock),
        Implementation("scaled_mm", _scaled_mm, _scaled_mm_why_not),
        Implementation(
            "triton", _triton, multiplied(where(triton, UP_TO_FLOAT32)), default=Linear8bitConfig(), bind=_bind
        ),
    ),
    allocate=_allocate,
    backward=None,
    dtypes=FORMATS,
    same_dtype=("weight",),
    verification=VERIFICATION,
    tuning=TUNING,
)
