"""y = h[..., :F] * gelu(h[..., F:]), h = x + bias: the gate between the two linears of a transformer's feed-forward.

It adds the bias, splits, and multiplies by the exact GELU of the gate.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from rocm_sd.errors import Unsupported
from rocm_sd.kernels import triton
from rocm_sd.kernels.configs.geglu import GegluConfig
from rocm_sd.ops.defining import Saved, define
from rocm_sd.ops.definition import UP_TO_FLOAT32, Implementation, where
from rocm_sd.ops.geglu.workload import TUNING, VERIFICATION
from rocm_sd.ops.layouts import as_rows, dense, is_dense, rows_in_place
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from rocm_sd.ops.layouts import Part

__all__ = ["OP", "geglu"]


def geglu(x: torch.Tensor, bias: torch.Tensor | None = None, implementation: str | None = None) -> torch.Tensor:
    """y = h[..., :F] * gelu(h[..., F:]), h = x + bias, with the exact GELU (erf).

    x: [..., 2F] of any strides, fp16, bf16, fp32 or fp64; bias: [2F]; y: [..., F], dense, of x's dtype.
    `implementation` names one and never falls back; without it the tuning data decides.
    """
    bound = OP.bound(implementation, x, bias)
    if bound is not None:
        return bound(x, bias)
    if not x.dim() or not x.shape[-1] or x.shape[-1] % 2:
        raise Unsupported(OP.name, f"x of shape {tuple(x.shape)}: it takes [..., 2F] with F of at least 1")
    OP.require_shape("bias", bias, (x.shape[-1],))
    return OP.call(x, bias, implementation=implementation)


def _shape(x: Tensor) -> tuple[int, ...]:
    return *x.shape[:-1], x.shape[-1] // 2


def _allocate(x: Tensor) -> Tensor:
    return x.new_empty(_shape(x))


def _stock(x: Tensor, bias: Part) -> Tensor:
    h = x if bias is None else x + bias.to(x.dtype)
    value, gate = h.chunk(2, dim=-1)
    return (value * F.gelu(gate)).contiguous()


def _triton(x: Tensor, bias: Part, *, config: GegluConfig) -> Tensor:
    y = _allocate(x)
    if y.numel():
        triton.launch_op("geglu", x.device, as_rows(x), y.view(-1, y.shape[-1]), dense(bias), config)
    return y


def _bind(x: Tensor, bias: Part, *, config: GegluConfig) -> Callable[..., Tensor] | None:
    rows = rows_in_place(x)
    if rows is None or not x.numel() or not is_dense(bias):
        return None
    launch = triton.bind_op("geglu", rows, bias, config)
    if launch is None:
        return None

    shape = _shape(x)

    def bound(x: Tensor, bias: Part) -> Tensor:
        y = x.new_empty(shape)
        launch(x, bias, y)
        return y

    return bound


def _backward(saved: Saved, grad: Tensor) -> Mapping[str, Part]:
    """h anew, then the closed form, gelu'(g) = Phi(g) + g * phi(g), in float32 or wider."""
    x, bias = saved.x, saved.bias
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide) if bias is None else x.to(wide) + bias.to(wide)
    value, gate = h.chunk(2, dim=-1)
    below = 0.5 * torch.erfc(gate * -math.sqrt(0.5))
    density = torch.exp(-0.5 * gate.square()) / math.sqrt(2 * math.pi)
    d_y = grad.to(wide)
    d_h = torch.cat([d_y * gate * below, d_y * value * (below + gate * density)], dim=-1)
    return {"x": d_h, "bias": d_h.reshape(-1, d_h.shape[-1]).sum(dim=0) if "bias" in saved.wanted else None}


OP = define(
    geglu,
    summary="bias, split, exact GELU and multiply of a feed-forward in one pass",
    family="elementwise",
    implementations=(
        Implementation(STOCK, _stock),
        Implementation("triton", _triton, where(triton, UP_TO_FLOAT32), default=GegluConfig(), bind=_bind),
    ),
    allocate=_allocate,
    backward=_backward,
    verification=VERIFICATION,
    tuning=TUNING,
)
