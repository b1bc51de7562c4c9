"""y = h[..., :F] * gelu(h[..., F:]), h = x @ weight.T + bias: the first half of a transformer's feed-forward.

It is the GEMM before `geglu` with that in its epilogue: a program keeps the sums of both halves in registers, so that
the [M, 2F] between them is never in memory. `library_geglu` is the two ops one after the other.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from rocm_sd.errors import Unsupported
from rocm_sd.kernels import hip, triton
from rocm_sd.kernels.configs.linear_geglu import LinearGegluConfig
from rocm_sd.kernels.hip.linear_geglu import BY_UNIT
from rocm_sd.ops.defining import Saved, define
from rocm_sd.ops.definition import HALVES, Implementation, where
from rocm_sd.ops.geglu import geglu
from rocm_sd.ops.layouts import as_rows, dense, is_dense, rows_in_place
from rocm_sd.ops.linear_geglu.workload import HIP, TUNING, VERIFICATION, variant
from rocm_sd.ops.linear_residual import linear_residual
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from torch import Tensor

    from rocm_sd.kernels.hip.linear_geglu import LinearGegluConfig as HipConfig
    from rocm_sd.ops.layouts import Part
    from rocm_sd.tuning import Problem

__all__ = ["OP", "linear_geglu"]


def linear_geglu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, implementation: str | None = None
) -> torch.Tensor:
    """y = h[..., :F] * gelu(h[..., F:]), h = x @ weight.T + bias, with the exact GELU (erf).

    x: [..., K] of any strides; weight: [2F, K]; bias: [2F]; all of one dtype, fp16, bf16, fp32 or fp64; y: [..., F],
    dense. `implementation` names one and never falls back; without it the tuning data decides.
    """
    bound = OP.bound(implementation, x, weight, bias)
    if bound is not None:
        return bound(x, weight, bias)
    if not x.dim() or not x.shape[-1]:
        raise Unsupported(OP.name, f"x of shape {tuple(x.shape)}: it takes [..., K] with K of at least 1")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or not weight.shape[0] or weight.shape[0] % 2:
        raise Unsupported(OP.name, f"weight of shape {tuple(weight.shape)}: it takes [2F, {x.shape[-1]}]")
    OP.require_shape("bias", bias, (weight.shape[0],))
    return OP.call(x, weight, bias, implementation=implementation)


def _shape(x: Tensor, weight: Tensor) -> tuple[int, ...]:
    return *x.shape[:-1], weight.shape[0] // 2


def _allocate(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(_shape(x, weight))


def _stock(x: Tensor, weight: Tensor, bias: Part) -> Tensor:
    value, gate = F.linear(x, weight, bias).chunk(2, dim=-1)
    return (value * F.gelu(gate)).contiguous()


def _library_geglu(x: Tensor, weight: Tensor, bias: Part) -> Tensor:
    """The product by `linear_residual`, then bias and gate by `geglu`: [..., 2F] is written once and read once."""
    return geglu(linear_residual(x, weight), bias)


def _library_geglu_why_not(problem: Problem, device: torch.device) -> str | None:
    """Where sums are rounded to half precision, the order of adding up is not seen."""
    if device.type == "cpu" or problem["dtype"] != "float32":
        return None
    # On an H200 six times stock's error, once in a hundred calls.
    return (
        "float32: without a bias a library may multiply by another kernel, whose error can be more than twice stock's"
    )


def _by_kernel(
    language: ModuleType, x: Tensor, weight: Tensor, bias: Part, *, config: LinearGegluConfig | HipConfig
) -> Tensor:
    y = _allocate(x, weight)
    if y.numel():
        rows = y.view(-1, y.shape[-1])
        language.launch_op("linear_geglu", x.device, as_rows(x), as_rows(weight), dense(bias), rows, config)
    return y


def _bind(x: Tensor, weight: Tensor, bias: Part, *, config: LinearGegluConfig) -> Callable[..., Tensor] | None:
    rows, columns = rows_in_place(x), rows_in_place(weight)
    if rows is None or columns is None or not x.numel() or not is_dense(bias):
        return None
    launch = triton.bind_op("linear_geglu", rows, columns, bias, config)
    if launch is None:
        return None

    shape = _shape(x, weight)

    def bound(x: Tensor, weight: Tensor, bias: Part) -> Tensor:
        y = x.new_empty(shape)
        launch(x, weight, bias, y)
        return y

    return bound


def _backward(saved: Saved, grad: Tensor) -> Mapping[str, Part]:
    """h anew, by the library; then the closed form, gelu'(g) = Phi(g) + g * phi(g), in float32 or wider."""
    x, weight, bias, wanted = saved.x, saved.weight, saved.bias, saved.wanted
    wide = torch.promote_types(x.dtype, torch.float32)
    value, gate = F.linear(x, weight, bias).to(wide).chunk(2, dim=-1)
    below = 0.5 * torch.erfc(gate * -math.sqrt(0.5))
    density = torch.exp(-0.5 * gate.square()) / math.sqrt(2 * math.pi)
    d_y = grad.to(wide)
    d_wide = torch.cat([d_y * gate * below, d_y * value * (below + gate * density)], dim=-1)
    d_h = d_wide.to(x.dtype)
    return {
        "x": d_h @ weight if "x" in wanted else None,
        "weight": d_h.reshape(-1, d_h.shape[-1]).T @ x.reshape(-1, x.shape[-1]) if "weight" in wanted else None,
        "bias": d_wide.reshape(-1, d_wide.shape[-1]).sum(dim=0) if "bias" in wanted else None,
    }


OP = define(
    linear_geglu,
    summary="GEMM with bias, split, exact GELU and multiply in its epilogue: the first half of a feed-forward",
    family="GEMM",
    implementations=(
        Implementation(STOCK, _stock),
        Implementation("library_geglu", _library_geglu, _library_geglu_why_not, composed=True),
        Implementation(
            "triton",
            partial(_by_kernel, triton),
            where(triton, HALVES),
            default=LinearGegluConfig(),
            variant=variant,
            bind=_bind,
        ),
        Implementation("hip", partial(_by_kernel, hip), where(hip, HALVES), HIP, default=BY_UNIT),
    ),
    allocate=_allocate,
    backward=_backward,
    same_dtype=("weight", "bias"),
    verification=VERIFICATION,
    tuning=TUNING,
)
