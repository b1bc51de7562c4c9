"""total = x + residual; y = layer_norm(total): the norms of a transformer block, with the adds before them.

Without a residual it is LayerNorm alone, as at the beginning of every transformer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from rocm_sd.errors import Unsupported
from rocm_sd.kernels import hip as hip_kernels
from rocm_sd.kernels import triton as triton_kernels
from rocm_sd.ops.layer_norm_residual.workload import HIP, TUNING, VERIFICATION, problem
from rocm_sd.ops.registry import Implementation, Op, needs_no_dispatcher, register
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    implementation: str | None = None,
) -> Pair:
    """total = x + residual; y = layer_norm(total) * weight + bias over the last dimension; returns (y, total).

    x, residual: [..., C] of any strides and one dtype, fp16, bf16, fp32 or fp64; weight, bias: [C]; y and total are
    dense and of x's dtype. Without a residual the total is x itself. `implementation` names one and never falls back;
    without it the tuning data decides.
    """
    _validate(x, residual, weight, bias)
    if needs_no_dispatcher(x, residual, weight, bias):
        out: Pair = OP.run(problem(x, residual), x.device, implementation, x, residual, weight, bias, eps)
        return out
    if residual is None:
        # An operator of torch may not return what it was given. LayerNorm alone is one already, and differentiable.
        return F.layer_norm(x, x.shape[-1:], _as(weight, x), _as(bias, x), eps).contiguous(), x
    y, total = torch.ops.rocm_sd.layer_norm_residual(x, residual, weight, bias, eps, implementation)
    return y, total


def _validate(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> None:
    if x.dtype not in {torch.float16, torch.bfloat16, torch.float32, torch.float64}:
        raise Unsupported(OP.name, f"dtype {x.dtype}", hint="Use float16, bfloat16, float32 or float64.")
    if not x.dim() or not x.shape[-1]:
        raise Unsupported(OP.name, f"x of shape {tuple(x.shape)}: it takes [..., C] with C of at least 1")
    if residual is not None and residual.dtype != x.dtype:
        raise Unsupported(OP.name, f"x of {x.dtype} with residual of {residual.dtype}")
    C = x.shape[-1]
    for name, tensor, shape in (("residual", residual, tuple(x.shape)), ("weight", weight, (C,)), ("bias", bias, (C,))):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise Unsupported(OP.name, f"{name} of shape {tuple(tensor.shape)}: it takes {shape}")
        if tensor is not None and tensor.device != x.device:
            raise Unsupported(OP.name, f"x on {x.device} with {name} on {tensor.device}")


def _allocate(x: torch.Tensor) -> Pair:
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        torch.empty_like(x, memory_format=torch.contiguous_format),
    )


def _stock(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *,
    config: Mapping[str, int],  # noqa: ARG001 -- stock torch has nothing to configure
) -> Pair:
    total = x if residual is None else (x + residual).contiguous()
    return F.layer_norm(total, total.shape[-1:], _as(weight, x), _as(bias, x), eps).contiguous(), total


def _as(tensor: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(x.dtype)


def _triton(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *,
    config: Mapping[str, int],
) -> Pair:
    from rocm_sd.kernels.triton.layer_norm_residual import LayerNormResidualConfig, launch  # noqa: PLC0415 -- Triton

    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = x if residual is None else torch.empty_like(y)
    if x.numel():
        C = x.shape[-1]
        weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
        added, sums = (None, None) if residual is None else (_rows(residual), total.view(-1, C))
        launch(
            _rows(x), added, y.view(-1, C), sums, weight, bias, eps, LayerNormResidualConfig.from_mapping(config)
        )  # fmt: skip
    return y, total


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[M, C] with the values of a row side by side; a view where that can be."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _triton_why_not(problem: Problem, device: torch.device) -> str | None:
    if problem["dtype"] == "float64":
        return "dtype float64"
    if int(problem["c"]) > _WIDEST:
        return f"rows of {problem['c']} values: a row of more than {_WIDEST} does not stay in registers"
    return triton_kernels.why_not(device)


def _hip(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *,
    config: Mapping[str, int],
) -> Pair:
    from rocm_sd.kernels.hip.layer_norm_residual import LayerNormResidualConfig, launch  # noqa: PLC0415 -- if used

    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = x if residual is None else torch.empty_like(y)
    if x.numel():
        C = x.shape[-1]
        weight, bias = (None if t is None else t.to(x.dtype).contiguous() for t in (weight, bias))
        added, sums = (None, None) if residual is None else (_rows(residual), total.view(-1, C))
        launch(
            _rows(x), added, y.view(-1, C), sums, weight, bias, eps, LayerNormResidualConfig.from_mapping(config),
            hip_kernels.launcher_for(x.device),
        )  # fmt: skip
    return y, total


def _hip_why_not(problem: Problem, device: torch.device) -> str | None:
    if problem["dtype"] == "float64":
        return "dtype float64"
    if int(problem["c"]) > _WIDEST_HIP:
        return f"rows of {problem['c']} values: a row of more than {_WIDEST_HIP} may not stay in registers"
    return hip_kernels.why_not(device)


OP = register(
    Op(
        name="layer_norm_residual",
        summary="residual add and LayerNorm in one pass; returns both",
        implementations=(
            Implementation(STOCK, _stock, lambda _problem, _device: None),
            Implementation("triton", _triton, _triton_why_not),
            Implementation("hip", _hip, _hip_why_not, HIP),
        ),
        default_config={"rows": 4, "warps": 4, "chunk": 256},
        verification=VERIFICATION,
        tuning=TUNING,
    )
)


@torch.library.custom_op(
    "rocm_sd::layer_norm_residual",
    mutates_args=(),
    schema=(
        "(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, str? implementation=None) "
        "-> (Tensor, Tensor)"
    ),
)
def _op(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    implementation: str | None = None,
) -> Pair:
    out: Pair = OP.run(problem(x), x.device, implementation, x, residual, weight, bias, eps)
    return out


@_op.register_fake
def _(x: torch.Tensor, *_arguments: Any, **_named: Any) -> Pair:
    return _allocate(x)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    _x, _residual, weight, bias, eps = inputs[:5]
    ctx.save_for_backward(output[1], weight, bias)
    ctx.eps = eps


def _backward(ctx: Any, grad_y: torch.Tensor, grad_total: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Mean and spread anew from `total`, then the closed form, in float32 or wider; `total` passes its gradient on."""
    total, weight, bias = ctx.saved_tensors
    wide = torch.promote_types(total.dtype, torch.float32)
    C = total.shape[-1]
    variance, mean = torch.var_mean(total.to(wide), dim=-1, correction=0, keepdim=True)
    rstd = (variance + ctx.eps).rsqrt()
    normal = (total.to(wide) - mean) * rstd
    d_affine = grad_y.to(wide)
    d_normal = d_affine if weight is None else d_affine * weight.to(wide)
    centred = d_normal - d_normal.mean(dim=-1, keepdim=True)
    d_total = rstd * (centred - normal * (d_normal * normal).mean(dim=-1, keepdim=True))
    d_x = (d_total + grad_total.to(wide)).to(total.dtype)
    return (
        d_x,
        d_x,
        None if weight is None else (d_affine * normal).reshape(-1, C).sum(dim=0).to(weight.dtype),
        None if bias is None else d_affine.reshape(-1, C).sum(dim=0).to(bias.dtype),
        None,
        None,
    )


_op.register_autograd(_backward, setup_context=_setup_context)
