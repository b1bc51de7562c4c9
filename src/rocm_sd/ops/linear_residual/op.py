"""y = x @ weight.T + bias + residual: the linears of every transformer block, with the add after them.

It is a GEMM with bias and residual in its epilogue; `pack_linears` makes one weight of Q, K and V.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from rocm_sd.errors import Unsupported
from rocm_sd.kernels import hip, triton
from rocm_sd.kernels.configs.linear_residual import LinearResidualConfig
from rocm_sd.ops.defining import Saved, define
from rocm_sd.ops.definition import HALVES, Implementation, where
from rocm_sd.ops.layouts import as_rows, dense, has_gaps, is_dense, rows_in_place
from rocm_sd.ops.linear_residual import libraries, tunable
from rocm_sd.ops.linear_residual.workload import HIP, HIP_SMALLEST, TUNING, VERIFICATION, problem, variant
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from rocm_sd.kernels.hip.linear_residual import LinearResidualConfig as HipConfig
    from rocm_sd.ops.layouts import Part
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
    bound = OP.bound(implementation, x, weight, bias, residual)
    if bound is not None:
        return bound(x, weight, bias, residual)
    if not x.dim() or not x.shape[-1]:
        raise Unsupported(OP.name, f"x of shape {tuple(x.shape)}: it takes [..., K] with K of at least 1")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or not weight.shape[0]:
        raise Unsupported(OP.name, f"weight of shape {tuple(weight.shape)}: it takes [N, {x.shape[-1]}]")
    OP.require_shape("bias", bias, weight.shape[:1])
    OP.require_shape("residual", residual, (*x.shape[:-1], weight.shape[0]))
    return OP.call(x, weight, bias, residual, implementation=implementation)


def _shape(x: Tensor, weight: Tensor) -> tuple[int, ...]:
    return *x.shape[:-1], weight.shape[0]


def _allocate(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(_shape(x, weight))


def _linear(x: Tensor, weight: Tensor, bias: Part) -> Tensor:
    # Of rows with gaps between samples torch makes a product, and adds the bias in a pass of its own.
    return F.linear(x.contiguous() if has_gaps(x) else x, weight, bias)


def _stock(x: Tensor, weight: Tensor, bias: Part, residual: Part) -> Tensor:
    y = _linear(x, weight, bias)
    return (y if residual is None else y + residual).contiguous()


def _bind_stock(x: Tensor, _weight: Tensor, _bias: Part, residual: Part) -> Callable[..., Tensor] | None:
    if has_gaps(x):
        return None
    return _product if residual is None else _product_and_residual


def _product(x: Tensor, weight: Tensor, bias: Part, _residual: None) -> Tensor:
    return F.linear(x, weight, bias).contiguous()


def _product_and_residual(x: Tensor, weight: Tensor, bias: Part, residual: Tensor) -> Tensor:
    return (F.linear(x, weight, bias) + residual).contiguous()


def _addmm(x: Tensor, weight: Tensor, bias: Part, residual: Part) -> Tensor:
    """The GEMM accumulates onto the residual (beta = 1); a bias is added to the residual first."""
    if residual is None:
        return _linear(x, weight, bias).contiguous()
    y = residual.contiguous() if bias is None else (residual + bias).contiguous()
    rows, terms = y.view(-1, weight.shape[0]), (x.reshape(-1, x.shape[-1]), weight.T)
    # With a bias the sum is a tensor of our own, and is accumulated in place: torch would copy it otherwise.
    out = torch.addmm(rows, *terms) if bias is None else rows.addmm_(*terms)
    return out.view(y.shape)


def _library(x: Tensor, weight: Tensor, bias: Part, residual: Part, *, library: libraries.GemmLibrary) -> Tensor:
    """As `_addmm`, by one named library. Where that cannot add a bias, torch would take another for it: not here."""
    with libraries.preferred(library):
        if residual is None and bias is not None and not library.adds_bias:
            return _linear(x, weight, None).add_(bias)
        return _addmm(x, weight, bias, residual)


def _library_why_not(problem: Problem, device: torch.device, *, library: libraries.GemmLibrary) -> str | None:
    if problem["dtype"] not in HALVES:
        return f"dtype {problem['dtype']}"
    return libraries.why_not(library, device)


def _tuned(x: Tensor, weight: Tensor, bias: Part, residual: Part) -> Tensor:
    """As `_addmm`, by TunableOp's kernel. Its product with a bias is another one, which was not tuned: not here."""
    rows = x.contiguous() if has_gaps(x) else x
    with tunable.in_use():
        if residual is None:
            y = F.linear(rows, weight)
            return (y if bias is None else y.add_(bias)).contiguous()
        return _addmm(rows, weight, bias, residual)


def _tuned_why_not(problem: Problem, device: torch.device) -> str | None:
    return f"dtype {problem['dtype']}" if problem["dtype"] not in HALVES else tunable.why_not(problem, device)


def _triton(x: Tensor, weight: Tensor, bias: Part, residual: Part, *, config: LinearResidualConfig) -> Tensor:
    y = _allocate(x, weight)
    if y.numel():
        added, rows = None if residual is None else as_rows(residual), y.view(-1, y.shape[-1])
        given = (as_rows(x), as_rows(weight), dense(bias), added, rows, config)
        triton.launch_op("linear_residual", x.device, *given)
    return y


def _bind(
    x: Tensor, weight: Tensor, bias: Part, residual: Part, *, config: LinearResidualConfig
) -> Callable[..., Tensor] | None:
    rows, columns, added = (
        rows_in_place(x),
        rows_in_place(weight),
        None if residual is None else rows_in_place(residual),
    )
    if rows is None or columns is None or not x.numel() or not is_dense(bias):
        return None
    if residual is not None and added is None:
        return None
    launch = triton.bind_op("linear_residual", rows, columns, bias, added, config)
    if launch is None:
        return None

    shape = _shape(x, weight)

    def bound(x: Tensor, weight: Tensor, bias: Part, residual: Part) -> Tensor:
        y = x.new_empty(shape)
        launch(x, weight, bias, residual, y)
        return y

    return bound


def _hip(x: Tensor, weight: Tensor, bias: Part, residual: Part, *, config: HipConfig) -> Tensor:
    from rocm_sd.kernels.hip.linear_residual import launch, launch_batched  # noqa: PLC0415 -- only where used

    y = _allocate(x, weight)
    if y.numel() and has_gaps(x) and config.split_k == 1:
        # Read where it lies. Only the product of whole matrices has its K in parts: for that, x is copied.
        B, matrix, row = x.shape[0], as_rows(weight), dense(bias)
        weights, biases = matrix.expand(B, *matrix.shape), None if row is None else row.expand(B, *row.shape)
        launch_batched(x, weights, biases, dense(residual), y, config, hip.launcher_for(x.device))
    elif y.numel():
        added, rows = None if residual is None else as_rows(residual), y.view(-1, y.shape[-1])
        launch(as_rows(x), as_rows(weight), dense(bias), added, rows, config, hip.launcher_for(x.device))
    return y


def _parts_bytes(arguments: tuple[Any, ...], config: LinearResidualConfig | HipConfig, _device: torch.device) -> int:
    """The sums of the parts into which `split_k` cuts K, in float32."""
    asked = problem(*arguments)
    return 4 * config.split_k * int(asked["m"]) * int(asked["n"]) if config.split_k > 1 else 0


def _backward(saved: Saved, grad: Tensor) -> Mapping[str, Part]:
    x, weight, wanted = saved.x, saved.weight, saved.wanted
    rows = grad.reshape(-1, grad.shape[-1])
    return {
        "x": grad @ weight if "x" in wanted else None,
        "weight": rows.T @ x.reshape(-1, x.shape[-1]) if "weight" in wanted else None,
        "bias": rows.sum(dim=0) if "bias" in wanted else None,
        "residual": grad,
    }


OP = define(
    linear_residual,
    summary="GEMM with bias and residual in its epilogue; packed QKV and packed text K and V",
    family="GEMM",
    implementations=(
        Implementation(STOCK, _stock, bind=_bind_stock),
        Implementation("addmm", _addmm),
        *(
            Implementation(each.name, partial(_library, library=each), partial(_library_why_not, library=each))
            for each in libraries.GEMM_LIBRARIES
        ),
        Implementation(tunable.NAME, _tuned, _tuned_why_not),
        Implementation(
            "triton",
            _triton,
            where(triton, HALVES),
            default=LinearResidualConfig(),
            scratch_bytes=_parts_bytes,
            variant=variant,
            bind=_bind,
        ),
        Implementation(
            "hip", _hip, where(hip, HALVES), HIP, default=HIP_SMALLEST, scratch_bytes=_parts_bytes, variant=variant
        ),
    ),
    allocate=_allocate,
    backward=_backward,
    same_dtype=("weight", "bias", "residual"),
    saves=("x", "weight"),
    verification=VERIFICATION,
    tuning=TUNING,
)
