"""y = h[..., :F] * gelu(h[..., F:]), h = x @ weight.T + bias: the first half of a transformer's feed-forward."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from rocm_sd.errors import Unsupported
from rocm_sd.kernels import hip as hip_kernels
from rocm_sd.kernels import triton as triton_kernels
from rocm_sd.ops.geglu import geglu
from rocm_sd.ops.linear_geglu.workload import HIP, TUNING, VERIFICATION, problem
from rocm_sd.ops.linear_residual import linear_residual
from rocm_sd.ops.registry import Implementation, Op, needs_no_dispatcher, register
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.tuning import Problem

__all__ = ["OP", "linear_geglu"]


def linear_geglu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, implementation: str | None = None
) -> torch.Tensor:
    """y = h[..., :F] * gelu(h[..., F:]), h = x @ weight.T + bias, with the exact GELU (erf).

    x: [..., K] of any strides; weight: [2F, K]; bias: [2F]; all of one dtype, fp16, bf16, fp32 or fp64; y: [..., F],
    dense. `implementation` names one and never falls back; without it the tuning data decides.
    """
    _validate(x, weight, bias)
    if needs_no_dispatcher(x, weight, bias):
        out: torch.Tensor = OP.run(problem(x, weight, bias), x.device, implementation, x, weight, bias)
        return out
    y: torch.Tensor = torch.ops.rocm_sd.linear_geglu(x, weight, bias, implementation)
    return y


def _validate(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if x.dtype not in {torch.float16, torch.bfloat16, torch.float32, torch.float64}:
        raise Unsupported(OP.name, f"dtype {x.dtype}", hint="Use float16, bfloat16, float32 or float64.")
    if not x.dim() or not x.shape[-1]:
        raise Unsupported(OP.name, f"x of shape {tuple(x.shape)}: it takes [..., K] with K of at least 1")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or not weight.shape[0] or weight.shape[0] % 2:
        raise Unsupported(OP.name, f"weight of shape {tuple(weight.shape)}: it takes [2F, {x.shape[-1]}]")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise Unsupported(OP.name, f"bias of shape {tuple(bias.shape)}: it takes {(weight.shape[0],)}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.device != x.device:
            raise Unsupported(OP.name, f"x on {x.device} with {name} on {tensor.device}")
        if tensor is not None and tensor.dtype != x.dtype:
            raise Unsupported(OP.name, f"x of {x.dtype} with {name} of {tensor.dtype}")


def _allocate(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // 2))


def _stock(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    config: Mapping[str, int],  # noqa: ARG001 -- stock torch has nothing to configure
) -> torch.Tensor:
    value, gate = F.linear(x, weight, bias).chunk(2, dim=-1)
    return (value * F.gelu(gate)).contiguous()


def _library_geglu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    config: Mapping[str, int],  # noqa: ARG001 -- each of the two ops looks up its own
) -> torch.Tensor:
    """The product by `linear_residual`, then bias and gate by `geglu`: [..., 2F] is written once and read once."""
    return geglu(linear_residual(x, weight), bias)


def _triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, config: Mapping[str, int]
) -> torch.Tensor:
    from rocm_sd.kernels.triton.linear_geglu import LinearGegluConfig, launch  # noqa: PLC0415 -- needs Triton

    y = _allocate(x, weight)
    if y.numel():
        bias = None if bias is None else bias.contiguous()
        rows = y.view(-1, y.shape[-1])
        launch(_rows(x), _rows(weight), bias, rows, LinearGegluConfig.from_mapping(config))
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
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, config: Mapping[str, int]
) -> torch.Tensor:
    from rocm_sd.kernels.hip.linear_geglu import LinearGegluConfig, launch  # noqa: PLC0415 -- only where used

    y = _allocate(x, weight)
    if y.numel():
        launch(
            _rows(x), _rows(weight), None if bias is None else bias.contiguous(), y.view(-1, y.shape[-1]),
            LinearGegluConfig.from_mapping(config), hip_kernels.launcher_for(x.device),
        )  # fmt: skip
    return y


def _hip_why_not(problem: Problem, device: torch.device) -> str | None:
    if problem["dtype"] not in ("float16", "bfloat16"):
        return f"dtype {problem['dtype']}"
    return hip_kernels.why_not(device)


OP = register(
    Op(
        name="linear_geglu",
        summary="GEMM with bias, split, exact GELU and multiply in its epilogue: the first half of a feed-forward",
        implementations=(
            Implementation(STOCK, _stock, lambda _problem, _device: None),
            Implementation("library_geglu", _library_geglu, lambda _problem, _device: None),
            Implementation("triton", _triton, _triton_why_not),
            Implementation("hip", _hip, _hip_why_not, HIP),
        ),
        default_config={"block_m": 64, "block_n": 64, "block_k": 32, "group_m": 8, "warps": 4, "stages": 2},
        verification=VERIFICATION,
        tuning=TUNING,
    )
)


@torch.library.custom_op(
    "rocm_sd::linear_geglu",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, str? implementation=None) -> Tensor",
)
def _op(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, implementation: str | None = None
) -> torch.Tensor:
    out: torch.Tensor = OP.run(problem(x, weight, bias), x.device, implementation, x, weight, bias)
    return out


@_op.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, *_arguments: Any, **_named: Any) -> torch.Tensor:
    return _allocate(x, weight)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001 -- torch's signature
    x, weight, bias = inputs[:3]
    ctx.save_for_backward(x, weight, bias)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """h anew, by the library; then the closed form, gelu'(g) = Phi(g) + g * phi(g), in float32 or wider."""
    x, weight, bias = ctx.saved_tensors
    for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
    wide = torch.promote_types(x.dtype, torch.float32)
    value, gate = F.linear(x, weight, bias).to(wide).chunk(2, dim=-1)
    below = 0.5 * torch.erfc(gate * -math.sqrt(0.5))
    density = torch.exp(-0.5 * gate.square()) / math.sqrt(2 * math.pi)
    d_y = grad.to(wide)
    d_wide = torch.cat([d_y * gate * below, d_y * value * (below + gate * density)], dim=-1)
    d_h = d_wide.to(x.dtype)
    return (
        (d_h @ weight) if for_x else None,
        (d_h.reshape(-1, d_h.shape[-1]).T @ x.reshape(-1, x.shape[-1])) if for_weight else None,
        d_wide.reshape(-1, d_wide.shape[-1]).sum(dim=0).to(x.dtype) if for_bias else None,
        None,
    )


_op.register_autograd(_backward, setup_context=_setup_context)
