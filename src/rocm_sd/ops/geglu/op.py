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
from rocm_sd.ops.eight_bits import dtype_of, limit_of, multiplied, require_eight_bits
from rocm_sd.ops.geglu.workload import TUNING, VERIFICATION
from rocm_sd.ops.layouts import as_rows, dense, is_dense, rows_in_place
from rocm_sd.ops.quantize_rows.reference import quantize_rows as quantized
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from rocm_sd.ops.layouts import Part

__all__ = ["OP", "geglu"]


def geglu(
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    to: str | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """y = h[..., :F] * gelu(h[..., F:]), h = x + bias, with the exact GELU (erf).

    x: [..., 2F] of any strides, fp16, bf16, fp32 or fp64; bias: [2F]; y: [..., F], dense, of x's dtype. With `to`
    (int8, float8_e4m3fn or float8_e4m3fnuz) and a scale, float32 of shape [1], y is rounded to 8 bits as
    `quantize_rows` does, and has no gradient. `implementation` names one and never falls back; without it the tuning
    data decides.
    """
    # An implementation by somebody else may know the first two alone.
    given = (x, bias) if to is None else (x, bias, scale, to)
    bound = OP.bound(implementation, *given)
    if bound is not None:
        return bound(*given)
    if not x.dim() or not x.shape[-1] or x.shape[-1] % 2:
        raise Unsupported(OP.name, f"x of shape {tuple(x.shape)}: it takes [..., 2F] with F of at least 1")
    OP.require_shape("bias", bias, (x.shape[-1],))
    require_eight_bits(OP.name, scale, to, x, bias)
    return OP.call(*given, implementation=implementation)


def _shape(x: Tensor) -> tuple[int, ...]:
    return *x.shape[:-1], x.shape[-1] // 2


def _allocate(x: Tensor, to: str | None) -> Tensor:
    return x.new_empty(_shape(x), dtype=dtype_of(x, to))


def _stock(x: Tensor, bias: Part, scale: Part = None, to: str | None = None) -> Tensor:
    h = x if bias is None else x + bias.to(x.dtype)
    value, gate = h.chunk(2, dim=-1)
    y = (value * F.gelu(gate)).contiguous()
    return y if to is None else quantized(y, to, scale)[0]


def _triton(x: Tensor, bias: Part, scale: Part = None, to: str | None = None, *, config: GegluConfig) -> Tensor:
    y = _allocate(x, to)
    if y.numel():
        given = (as_rows(x), y.view(-1, y.shape[-1]), dense(bias), scale, limit_of(to), config)
        triton.launch_op("geglu", x.device, *given)
    return y


def _bind(
    x: Tensor, bias: Part, _scale: Part = None, to: str | None = None, *, config: GegluConfig
) -> Callable[..., Tensor] | None:
    rows = rows_in_place(x)
    if rows is None or not x.numel() or not is_dense(bias):
        return None
    launch = triton.bind_op("geglu", rows, bias, limit_of(to), config)
    if launch is None:
        return None

    shape, dtype = _shape(x), dtype_of(x, to)

    def bound(x: Tensor, bias: Part, scale: Part = None, _to: str | None = None) -> Tensor:
        y = x.new_empty(shape, dtype=dtype)
        launch(x, bias, scale, y)
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
        Implementation("triton", _triton, multiplied(where(triton, UP_TO_FLOAT32)), default=GegluConfig(), bind=_bind),
    ),
    allocate=_allocate,
    backward=_backward,
    verification=VERIFICATION,
    tuning=TUNING,
)
