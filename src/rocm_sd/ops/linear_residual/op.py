"""y = x @ weight.T + bias + residual: the linears of every transformer block, with the add after them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from rocm_sd.errors import Unsupported
from rocm_sd.kernels import hip as hip_kernels
from rocm_sd.kernels import triton as triton_kernels
from rocm_sd.ops.linear_residual import libraries
from rocm_sd.ops.linear_residual.workload import HIP, TUNING, VERIFICATION, problem
from rocm_sd.ops.registry import Implementation, Op, needs_no_dispatcher, register
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.tuning import Problem

__all__ = ["OP", "linear_residual"]


def linear_residual(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """y = x @ weight.T + bias + residual; x: [..., K] of any strides; weight: [N, K]; bias: [N]; residual: [..., N].

    x, weight and residual have one dtype, fp16, bf16, fp32 or fp64; y: [..., N], dense. `implementation` names one and
    never falls back; without it the tuning data decides.
    """
    _validate(x, weight, bias, residual)
    if needs_no_dispatcher(x, weight, bias, residual):
        arguments = (x, weight, bias, residual)
        out: torch.Tensor = OP.run(problem(*arguments), x.device, implementation, *arguments)
        return out
    y: torch.Tensor = torch.ops.rocm_sd.linear_residual(x, weight, bias, residual, implementation)
    return y


def _validate(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None) -> None:
    if x.dtype not in {torch.float16, torch.bfloat16, torch.float32, torch.float64}:
        raise Unsupported(OP.name, f"dtype {x.dtype}", hint="Use float16, bfloat16, float32 or float64.")
    if not x.dim() or not x.shape[-1]:
        raise Unsupported(OP.name, f"x of shape {tuple(x.shape)}: it takes [..., K] with K of at least 1")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or not weight.shape[0]:
        raise Unsupported(OP.name, f"weight of shape {tuple(weight.shape)}: it takes [N, {x.shape[-1]}]")
    N = weight.shape[0]
    for name, tensor, shape in (("bias", bias, (N,)), ("residual", residual, (*x.shape[:-1], N))):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise Unsupported(OP.name, f"{name} of shape {tuple(tensor.shape)}: it takes {shape}")
    for name, tensor in (("weight", weight), ("bias", bias), ("residual", residual)):
        if tensor is not None and tensor.device != x.device:
            raise Unsupported(OP.name, f"x on {x.device} with {name} on {tensor.device}")
        if tensor is not None and tensor.dtype != x.dtype:
            raise Unsupported(OP.name, f"x of {x.dtype} with {name} of {tensor.dtype}")


def _allocate(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _stock(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    *,
    config: Mapping[str, int],  # noqa: ARG001 -- stock torch has nothing to configure
) -> torch.Tensor:
    y = F.linear(x, weight, bias)
    return (y if residual is None else y + residual).contiguous()


def _addmm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    *,
    config: Mapping[str, int],  # noqa: ARG001 -- torch has nothing to configure
) -> torch.Tensor:
    """The GEMM accumulates onto the residual (beta = 1); a bias beside it is added to the residual first."""
    if residual is None:
        return F.linear(x, weight, bias).contiguous()
    y = residual.contiguous() if bias is None else (residual + bias).contiguous()
    rows, terms = y.view(-1, weight.shape[0]), (x.reshape(-1, x.shape[-1]), weight.T)
    # With a bias the sum is a tensor of our own, and is accumulated in place: torch would copy it otherwise.
    out = torch.addmm(rows, *terms) if bias is None else rows.addmm_(*terms)
    return out.view(y.shape)


def _library(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    *,
    config: Mapping[str, int],
    library: libraries.Library,
) -> torch.Tensor:
    """As `_addmm`, by one named library. Where that cannot add a bias, torch would take another for it: not here."""
    with libraries.preferred(library):
        if residual is None and bias is not None and not library.adds_bias:
            return F.linear(x, weight).add_(bias)
        return _addmm(x, weight, bias, residual, config=config)


def _library_why_not(problem: Problem, device: torch.device, *, library: libraries.Library) -> str | None:
    if problem["dtype"] not in ("float16", "bfloat16"):
        return f"dtype {problem['dtype']}"
    return libraries.why_not(library, device)


def _triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    *,
    config: Mapping[str, int],
) -> torch.Tensor:
    from rocm_sd.kernels.triton.linear_residual import LinearResidualConfig, launch  # noqa: PLC0415 -- needs Triton

    y = _allocate(x, weight)
    if y.numel():
        launch(
            _rows(x), _rows(weight), None if bias is None else bias.contiguous(),
            None if residual is None else _rows(residual), y.view(-1, y.shape[-1]),
            LinearResidualConfig.from_mapping(config),
        )  # fmt: skip
    return y


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[M, K] with the values of a row side by side; a view where that can be."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _triton_why_not(problem: Problem, device: torch.device) -> str | None:
    if problem["dtype"] not in ("float16", "bfloat16"):
        return f"dtype {problem['dtype']}"
    return triton_kernels.why_not(device)


def _hip(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    *,
    config: Mapping[str, int],
) -> torch.Tensor:
    from rocm_sd.kernels.hip.linear_residual import LinearResidualConfig, launch  # noqa: PLC0415 -- only where used

    y = _allocate(x, weight)
    if y.numel():
        launch(
            _rows(x), _rows(weight), None if bias is None else bias.contiguous(),
            None if residual is None else _rows(residual), y.view(-1, y.shape[-1]),
            LinearResidualConfig.from_mapping(config), hip_kernels.launcher_for(x.device),
        )  # fmt: skip
    return y


def _hip_why_not(problem: Problem, device: torch.device) -> str | None:
    if problem["dtype"] not in ("float16", "bfloat16"):
        return f"dtype {problem['dtype']}"
    return hip_kernels.why_not(device)


OP = register(
    Op(
        name="linear_residual",
        summary="GEMM with bias and residual in its epilogue; packed QKV and packed text K and V",
        implementations=(
            Implementation(STOCK, _stock, lambda _problem, _device: None),
            Implementation("addmm", _addmm, lambda _problem, _device: None),
            *(
                Implementation(
                    library.name, partial(_library, library=library), partial(_library_why_not, library=library)
                )
                for library in libraries.LIBRARIES
            ),
            Implementation("triton", _triton, _triton_why_not),
            Implementation("hip", _hip, _hip_why_not, HIP),
        ),
        default_config={
            "block_m": 64,
            "block_n": 64,
            "block_k": 32,
            "group_m": 8,
            "split_k": 1,
            "warps": 4,
            "stages": 2,
        },
        verification=VERIFICATION,
        tuning=TUNING,
    )
)


@torch.library.custom_op(
    "rocm_sd::linear_residual",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, str? implementation=None) -> Tensor",
)
def _op(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    implementation: str | None = None,
) -> torch.Tensor:
    arguments = (x, weight, bias, residual)
    out: torch.Tensor = OP.run(problem(*arguments), x.device, implementation, *arguments)
    return out


@_op.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, *_arguments: Any, **_named: Any) -> torch.Tensor:
    return _allocate(x, weight)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001 -- torch's signature
    x, weight = inputs[:2]
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    for_x, for_weight, for_bias, for_residual = ctx.needs_input_grad[:4]
    rows = grad.reshape(-1, grad.shape[-1])
    return (
        (grad @ weight) if for_x else None,
        (rows.T @ x.reshape(-1, x.shape[-1])) if for_weight else None,
        rows.sum(dim=0) if for_bias else None,
        grad if for_residual else None,
        None,
    )


_op.register_autograd(_backward, setup_context=_setup_context)
