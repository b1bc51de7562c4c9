"""y = h[..., :F] * gelu(h[..., F:]), h = x + bias: the gate between the two linears of a transformer's feed-forward."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from rocm_sd.errors import Unsupported
from rocm_sd.kernels import triton as triton_kernels
from rocm_sd.ops.geglu.workload import TUNING, VERIFICATION, problem
from rocm_sd.ops.registry import Implementation, Op, needs_no_dispatcher, register
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.tuning import Problem

__all__ = ["OP", "geglu"]


def geglu(x: torch.Tensor, bias: torch.Tensor | None = None, implementation: str | None = None) -> torch.Tensor:
    """y = h[..., :F] * gelu(h[..., F:]), h = x + bias, with the exact GELU (erf).

    x: [..., 2F] of any strides, fp16, bf16, fp32 or fp64; bias: [2F]; y: [..., F], dense, of x's dtype.
    `implementation` names one and never falls back; without it the tuning data decides.
    """
    _validate(x, bias)
    if needs_no_dispatcher(x, bias):
        out: torch.Tensor = OP.run(problem(x), x.device, implementation, x, bias)
        return out
    y: torch.Tensor = torch.ops.rocm_sd.geglu(x, bias, implementation)
    return y


def _validate(x: torch.Tensor, bias: torch.Tensor | None) -> None:
    if x.dtype not in {torch.float16, torch.bfloat16, torch.float32, torch.float64}:
        raise Unsupported(OP.name, f"dtype {x.dtype}", hint="Use float16, bfloat16, float32 or float64.")
    if not x.dim() or not x.shape[-1] or x.shape[-1] % 2:
        raise Unsupported(OP.name, f"x of shape {tuple(x.shape)}: it takes [..., 2F] with F of at least 1")
    if bias is not None and tuple(bias.shape) != (x.shape[-1],):
        raise Unsupported(OP.name, f"bias of shape {tuple(bias.shape)}: it takes {(x.shape[-1],)}")
    if bias is not None and bias.device != x.device:
        raise Unsupported(OP.name, f"x on {x.device} with bias on {bias.device}")


def _allocate(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _stock(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    config: Mapping[str, int],  # noqa: ARG001 -- stock torch has nothing to configure
) -> torch.Tensor:
    h = x if bias is None else x + bias.to(x.dtype)
    value, gate = h.chunk(2, dim=-1)
    return (value * F.gelu(gate)).contiguous()


def _triton(x: torch.Tensor, bias: torch.Tensor | None, *, config: Mapping[str, int]) -> torch.Tensor:
    from rocm_sd.kernels.triton.geglu import GegluConfig, launch  # noqa: PLC0415 -- needs Triton

    y = _allocate(x)
    if y.numel():
        rows = x.reshape(-1, x.shape[-1])
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        bias = None if bias is None else bias.contiguous()
        launch(rows, y.view(-1, y.shape[-1]), bias, GegluConfig.from_mapping(config))
    return y


def _triton_why_not(problem: Problem, device: torch.device) -> str | None:
    if problem["dtype"] == "float64":
        return "dtype float64"
    return triton_kernels.why_not(device)


OP = register(
    Op(
        name="geglu",
        summary="bias, split, exact GELU and multiply of a feed-forward in one pass",
        implementations=(
            Implementation(STOCK, _stock, lambda _problem, _device: None),
            Implementation("triton", _triton, _triton_why_not),
        ),
        default_config={"block_f": 256, "rows": 4, "warps": 4},
        verification=VERIFICATION,
        tuning=TUNING,
    )
)


@torch.library.custom_op(
    "rocm_sd::geglu", mutates_args=(), schema="(Tensor x, Tensor? bias, str? implementation=None) -> Tensor"
)
def _op(x: torch.Tensor, bias: torch.Tensor | None, implementation: str | None = None) -> torch.Tensor:
    out: torch.Tensor = OP.run(problem(x), x.device, implementation, x, bias)
    return out


@_op.register_fake
def _(x: torch.Tensor, *_arguments: Any, **_named: Any) -> torch.Tensor:
    return _allocate(x)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001 -- torch's signature
    x, bias = inputs[:2]
    ctx.save_for_backward(x, bias)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """h anew, then the closed form, gelu'(g) = Phi(g) + g * phi(g), in float32 or wider."""
    x, bias = ctx.saved_tensors
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide) if bias is None else x.to(wide) + bias.to(wide)
    value, gate = h.chunk(2, dim=-1)
    below = 0.5 * torch.erfc(gate * -math.sqrt(0.5))
    density = torch.exp(-0.5 * gate.square()) / math.sqrt(2 * math.pi)
    d_y = grad.to(wide)
    d_h = torch.cat([d_y * gate * below, d_y * value * (below + gate * density)], dim=-1)
    d_bias = None if bias is None else d_h.reshape(-1, d_h.shape[-1]).sum(dim=0).to(bias.dtype)
    return d_h.to(x.dtype), d_bias, None


_op.register_autograd(_backward, setup_context=_setup_context)
