"""y = silu(group_norm(x + add)), channels-last in and out: the norm before every convolution of a UNet and a VAE.

It takes one pass where a group fits the registers of a workgroup, otherwise one pass for running means (Welford: no
cancellation) and one to apply them, walked backwards so that what was read last is still cached. It and a 1x1 `conv2d`
take input channels in two tensors (`concat=`), as they lie before each block of a UNet's way up: joining them first
would be two passes over both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from rocm_sd import arch
from rocm_sd.errors import Unsupported
from rocm_sd.kernels import hip, triton
from rocm_sd.kernels.configs.group_norm_silu import GroupNormSiluConfig
from rocm_sd.kernels.hip.group_norm_silu import GroupNormSiluConfig as HipConfig
from rocm_sd.ops.defining import Saved, define
from rocm_sd.ops.definition import UP_TO_FLOAT32, Implementation, where
from rocm_sd.ops.eight_bits import dtype_of, limit_of, multiplied, require_eight_bits
from rocm_sd.ops.group_norm_silu.workload import HIP, TUNING, VERIFICATION, problem, variant
from rocm_sd.ops.layouts import (
    as_dtype,
    channels_last,
    dense,
    is_channels_last,
    is_dense,
    joined,
    require_alike,
)
from rocm_sd.ops.quantize_rows import quantize_rows
from rocm_sd.ops.quantize_rows.reference import quantize_rows as rounded
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from rocm_sd.ops.layouts import Part
    from rocm_sd.tuning import Problem

__all__ = ["OP", "group_norm_silu", "group_norm_silu_"]


def group_norm_silu(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    add: torch.Tensor | None = None,
    eps: float = 1e-5,
    silu: bool = True,
    implementation: str | None = None,
    concat: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    to: str | None = None,
) -> torch.Tensor:
    """y = silu(group_norm(x + add)); x: [N, C, H, W] of any strides, fp16, bf16, fp32 or fp64; C % groups == 0.

    weight, bias: [C]; add: [N, C], e.g. a time embedding; y: x's dtype, channels-last. `implementation` names one and
    never falls back; without it the tuning data decides. `concat` has further channels, which follow x's: where
    `OP.reads_two`, they are never joined in memory. With `to` (int8, float8_e4m3fn or float8_e4m3fnuz) and a scale,
    float32 of shape [1], y is rounded to 8 bits as `quantize_rows` does, and has no gradient.
    """
    rounding = () if to is None else (scale, to)
    bound = OP.bound(implementation, x, groups, weight, bias, add, eps, silu, concat, *rounding)
    if bound is not None:
        return bound(x, groups, weight, bias, add, eps, silu, concat, *rounding)
    if concat is not None:
        require_alike(OP.name, x, concat)
        if not OP.at_once(x, groups, weight, bias, add, eps, silu, concat, *rounding):
            x, concat = joined(x, concat), None
    _validate(x, groups, weight, bias, add, concat)
    require_eight_bits(OP.name, scale, to, x, weight, bias, add, concat)
    if to is not None and not OP.at_once(x, groups, weight, bias, add, eps, silu, concat, scale, to):
        y = group_norm_silu(x, groups, weight, bias, add, eps, silu, implementation)
        return quantize_rows(y.permute(0, 2, 3, 1), to, scale)[0].permute(0, 3, 1, 2)
    return OP.call(x, groups, weight, bias, add, eps, silu, concat, *rounding, implementation=implementation)


def group_norm_silu_(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    add: torch.Tensor | None = None,
    eps: float = 1e-5,
    silu: bool = True,
) -> torch.Tensor:
    """`group_norm_silu`, into the memory of x where `OP.overwrites`. Whether or not, x is not to be read again."""
    _validate(x, groups, weight, bias, add)
    given = x, groups, weight, bias, add, eps, silu
    if x.is_contiguous(memory_format=torch.channels_last) and OP.at_once(*given, None):
        overwritten: torch.Tensor | None = OP.run_over(problem(x, groups), x.device, *given)
        if overwritten is not None:
            return overwritten
    return group_norm_silu(*given)


def _validate(x: Tensor, groups: int, weight: Part, bias: Part, add: Part, concat: Part = None) -> None:
    if x.dim() != 4:
        raise Unsupported(OP.name, f"x of {x.dim()} dimensions: it takes [N, C, H, W]")
    C = x.shape[1] + (0 if concat is None else concat.shape[1])
    if groups < 1 or C % groups:
        raise Unsupported(OP.name, f"{C} channels in {groups} groups")
    OP.require_shape("weight", weight, (C,))
    OP.require_shape("bias", bias, (C,))
    OP.require_shape("add", add, (x.shape[0], C))


def _allocate(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last)


def _allocate_both(x: Tensor, channels: int, to: str | None) -> Tensor:
    N, _, H, W = x.shape
    dtype = dtype_of(x, to)
    return torch.empty((N, channels, H, W), dtype=dtype, device=x.device, memory_format=torch.channels_last)


def _stock(
    x: Tensor, groups: int, weight: Part, bias: Part, add: Part, eps: float, silu: bool, concat: Part = None,
    scale: Part = None, to: str | None = None,
) -> Tensor:  # fmt: skip
    x = joined(x, concat)
    h = x if add is None else x + add[:, :, None, None].to(x.dtype)
    # Not F.group_norm, which refuses groups of one value; the definition has a value for them: the bias.
    y = torch.group_norm(h, groups, as_dtype(weight, x.dtype), as_dtype(bias, x.dtype), eps)
    if silu:
        y = F.silu(y, inplace=True)
    out = _allocate(x)
    if to is not None:
        y, out = rounded(y, to, scale)[0], torch.empty_like(out, dtype=dtype_of(x, to))
    # torch keeps channels-last on a CPU and loses it on a GPU (pytorch/pytorch#111824).
    return y if y.stride() == out.stride() else out.copy_(y)


def _triton(
    x: Tensor, groups: int, weight: Part, bias: Part, add: Part, eps: float, silu: bool, concat: Part = None,
    scale: Part = None, to: str | None = None, *, config: GroupNormSiluConfig, out: Part = None,
) -> Tensor:  # fmt: skip
    if concat is not None:
        C, H, W = x.shape[1] + concat.shape[1], *x.shape[2:]
        if config.one_pass(H * W, C // groups):
            # A workgroup that holds a whole group would read it in two pieces; maps that small are soon copied.
            x, concat = joined(x, concat), None
        else:
            out = _allocate_both(x, C, to)
    out = _allocate_both(x, x.shape[1], to) if out is None else out
    if out.numel():
        parts = tuple(channels_last(t) for t in (x, concat) if t is not None)
        units = arch.device_facts(x.device).compute_units or 1
        affine = dense(weight), dense(bias), dense(add)
        rounding = scale, limit_of(to)
        triton.launch_op("group_norm_silu", x.device, parts, out, groups, *affine, eps, silu, *rounding, config, units)
    return out


def _bind(
    x: Tensor, groups: int, weight: Part, bias: Part, add: Part, eps: float, silu: bool, concat: Part = None,
    _scale: Part = None, to: str | None = None, *, config: GroupNormSiluConfig,
) -> Callable[..., Tensor] | None:  # fmt: skip
    C, H, W = x.shape[1] + (0 if concat is None else concat.shape[1]), *x.shape[2:]
    joins = concat is not None and config.one_pass(H * W, C // groups)
    if joins or not x.numel() or not is_channels_last(x, concat) or not is_dense(weight, bias, add):
        return None
    units = arch.device_facts(x.device).compute_units or 1
    parts = (x,) if concat is None else (x, concat)
    given = groups, weight, bias, add, eps, silu, limit_of(to), config, units
    launch = triton.bind_op("group_norm_silu", parts, *given)
    if launch is None:
        return None

    def of_one(
        x: Tensor, _groups: int, weight: Part, bias: Part, add: Part, _eps: float, _silu: bool, _none: Part = None,
        scale: Part = None, *_rest: Any,
    ) -> Tensor:  # fmt: skip
        out = _allocate(x) if to is None else _allocate_both(x, C, to)
        launch((x,), out, weight, bias, add, scale)
        return out

    def of_two(
        x: Tensor, _groups: int, weight: Part, bias: Part, add: Part, _eps: float, _silu: bool, concat: Tensor,
        scale: Part = None, *_rest: Any,
    ) -> Tensor:  # fmt: skip
        out = _allocate_both(x, C, to)
        launch((x, concat), out, weight, bias, add, scale)
        return out

    return of_one if concat is None else of_two


def _hip(
    x: Tensor, groups: int, weight: Part, bias: Part, add: Part, eps: float, silu: bool, concat: Part = None,
    _scale: Part = None, _to: str | None = None, *, config: HipConfig, out: Part = None,
) -> Tensor:  # fmt: skip
    x = joined(x, concat)
    out = _allocate(x) if out is None else out
    if x.numel():
        affine = dense(weight, x.dtype), dense(bias, x.dtype), dense(add, x.dtype)
        units = arch.device_facts(x.device).compute_units or 1
        given = (channels_last(x), out, groups, *affine, eps, silu, config, units)
        hip.launch_op("group_norm_silu", x.device, *given)
    return out


def _not_for_hip(problem: Problem) -> str | None:
    if problem.get("to"):
        return f"a result of {problem['to']}"
    if int(problem["c"]) * int(problem["hw"]) >= 2**31:
        return f"{problem['c']} channels of {problem['hw']} pixels: the offsets of a picture pass 32 bits"
    return None


def _reads_two(problem: Problem, config: GroupNormSiluConfig) -> bool:
    """What takes two passes does."""
    return not config.one_pass(int(problem["hw"]), int(problem["c"]) // int(problem["groups"]))


def _backward(saved: Saved, grad: Tensor) -> Mapping[str, Part]:
    """Recompute through stock ops what inference never stores, then the closed form, in float32 or wider."""
    x, groups, weight, bias, add = saved.x, saved.groups, saved.weight, saved.bias, saved.add
    N, C, H, W = x.shape
    wide = torch.promote_types(x.dtype, torch.float32)

    def grouped(t: torch.Tensor) -> torch.Tensor:
        return t.reshape(N, groups, C // groups, H * W)

    def per_channel(t: torch.Tensor) -> torch.Tensor:
        return t.to(wide).reshape(1, groups, C // groups, 1)

    h = x.to(wide) if add is None else x.to(wide) + add.to(wide)[:, :, None, None]
    variance, mean = torch.var_mean(grouped(h), dim=(2, 3), correction=0, keepdim=True)
    rstd = (variance + saved.eps).rsqrt()
    normal = (grouped(h) - mean) * rstd
    d_affine = grouped(grad.to(wide))
    if saved.silu:
        affine = normal if weight is None else normal * per_channel(weight)
        affine = affine if bias is None else affine + per_channel(bias)
        gate = torch.sigmoid(affine)
        d_affine = d_affine * gate * (1 + affine * (1 - gate))
    d_normal = d_affine if weight is None else d_affine * per_channel(weight)
    centred = d_normal - d_normal.mean(dim=(2, 3), keepdim=True)
    d_h = rstd * (centred - normal * (d_normal * normal).mean(dim=(2, 3), keepdim=True))
    d_x = d_h.reshape(N, C, H, W)
    return {
        "x": d_x,
        "weight": (d_affine * normal).sum(dim=(0, 3)).reshape(C) if "weight" in saved.wanted else None,
        "bias": d_affine.sum(dim=(0, 3)).reshape(C) if "bias" in saved.wanted else None,
        "add": d_x.sum(dim=(2, 3)) if "add" in saved.wanted else None,
    }


OP = define(
    group_norm_silu,
    summary="GroupNorm with the time embedding's add before it and SiLU after it, channels-last",
    family="norm",
    implementations=(
        Implementation(STOCK, _stock),
        # A program of either kernel reads all that it needs of x before it writes, and nobody else reads what it
        # writes. What takes two passes over x has written nothing until the first one is over.
        Implementation(
            "triton",
            _triton,
            multiplied(where(triton, UP_TO_FLOAT32)),
            default=GroupNormSiluConfig(),
            reads_two=_reads_two,
            overwrites=True,
            variant=variant,
            bind=_bind,
        ),
        Implementation("hip", _hip, where(hip, UP_TO_FLOAT32, _not_for_hip), HIP, default=HipConfig(), overwrites=True),
    ),
    allocate=_allocate,
    backward=_backward,
    eager_only=("concat", "scale", "to"),
    verification=VERIFICATION,
    tuning=TUNING,
)
