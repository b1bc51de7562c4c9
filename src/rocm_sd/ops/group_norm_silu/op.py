"""y = silu(group_norm(x + add)), channels-last in and out: the norm before every convolution of a UNet and a VAE."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from rocm_sd import arch
from rocm_sd.errors import Unsupported
from rocm_sd.kernels import hip as hip_kernels
from rocm_sd.kernels import triton as triton_kernels
from rocm_sd.kernels.hip.launch import HipUnavailable
from rocm_sd.ops.group_norm_silu.workload import HIP, TUNING, VERIFICATION, problem
from rocm_sd.ops.joining import joined, require_alike
from rocm_sd.ops.registry import Implementation, Op, needs_no_dispatcher, register
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.tuning import Problem

__all__ = ["OP", "group_norm_silu", "group_norm_silu_", "overwrites", "reads_two"]


def group_norm_silu(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    add: torch.Tensor | None = None,
    eps: float = 1e-5,
    silu: bool = True,
    implementation: str | None = None,
    beside: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = silu(group_norm(x + add)); x: [N, C, H, W] of any strides, fp16, bf16, fp32 or fp64; C % groups == 0.

    weight, bias: [C]; add: [N, C], e.g. a time embedding; y: x's dtype, channels-last. `implementation` names one and
    never falls back; without it the tuning data decides. `beside` has further channels, which follow x's: where
    `reads_two`, they are never written beside each other.
    """
    if beside is not None:
        require_alike(OP.name, x, beside)
        if not needs_no_dispatcher(x, beside, weight, bias, add):
            x, beside = joined(x, beside), None
    _validate(x, groups, weight, bias, add, beside)
    if needs_no_dispatcher(x, weight, bias, add):
        given = (x, groups, weight, bias, add, eps, silu, beside)
        out: torch.Tensor = OP.run(problem(*given), x.device, implementation, *given)
        return out
    y: torch.Tensor = torch.ops.rocm_sd.group_norm_silu(x, groups, weight, bias, add, eps, silu, implementation)
    return y


def group_norm_silu_(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    add: torch.Tensor | None = None,
    eps: float = 1e-5,
    silu: bool = True,
) -> torch.Tensor:
    """`group_norm_silu`, into the memory of x where `overwrites` says so. Whether or not, x is not to be read again."""
    _validate(x, groups, weight, bias, add)
    dense = x.is_contiguous(memory_format=torch.channels_last)
    if dense and needs_no_dispatcher(x, weight, bias, add) and overwrites(problem(x, groups), x.device):
        choice = OP.choose(problem(x, groups), x.device)
        run = {"triton": _triton, "hip": _hip}[choice.implementation]
        with suppress(HipUnavailable):  # then nothing has touched x
            return run(x, groups, weight, bias, add, eps, silu, None, config=choice.config, out=x)
    return group_norm_silu(x, groups, weight, bias, add, eps, silu)


def overwrites(problem: Problem, device: torch.device) -> bool:
    """Whether the implementation that is chosen can do without a map of its own for the result.

    The kernels can: a program reads all that it needs of x before it writes, and nobody else reads what it writes. What
    takes two passes over x has written nothing until the first one is over.
    """
    return OP.choose(problem, device).implementation in {"triton", "hip"}


def reads_two(problem: Problem, device: torch.device) -> bool:
    """Whether the implementation that is chosen reads x and `beside` where they lie: what takes two passes does."""
    choice = OP.choose(problem, device)
    if choice.implementation != "triton":
        return False
    from rocm_sd.kernels.triton.group_norm_silu import GroupNormSiluConfig, one_pass  # noqa: PLC0415 -- needs Triton

    width = int(problem["c"]) // int(problem["groups"])
    return not one_pass(GroupNormSiluConfig.from_mapping(choice.config), int(problem["hw"]), width)


def _validate(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    beside: torch.Tensor | None = None,
) -> None:
    if x.dim() != 4:
        raise Unsupported(OP.name, f"x of {x.dim()} dimensions: it takes [N, C, H, W]")
    if x.dtype not in {torch.float16, torch.bfloat16, torch.float32, torch.float64}:
        raise Unsupported(OP.name, f"dtype {x.dtype}", hint="Use float16, bfloat16, float32 or float64.")
    N = x.shape[0]
    C = x.shape[1] + (0 if beside is None else beside.shape[1])
    if groups < 1 or C % groups:
        raise Unsupported(OP.name, f"{C} channels in {groups} groups")
    for name, tensor, shape in (("weight", weight, (C,)), ("bias", bias, (C,)), ("add", add, (N, C))):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise Unsupported(OP.name, f"{name} of shape {tuple(tensor.shape)}: it takes {shape}")
        if tensor is not None and tensor.device != x.device:
            raise Unsupported(OP.name, f"x on {x.device} with {name} on {tensor.device}")


def _allocate(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last)


def _stock(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    eps: float,
    silu: bool,
    beside: torch.Tensor | None = None,
    *,
    config: Mapping[str, int],  # noqa: ARG001 -- stock torch has nothing to configure
) -> torch.Tensor:
    x = joined(x, beside)
    h = x if add is None else x + add[:, :, None, None].to(x.dtype)
    # Not F.group_norm, which refuses groups of one value; the definition has a value for them: the bias.
    y = torch.group_norm(h, groups, _as(weight, x), _as(bias, x), eps)
    if silu:
        y = F.silu(y, inplace=True)
    out = _allocate(x)
    # torch keeps channels-last on a CPU and loses it on a GPU (pytorch/pytorch#111824).
    return y if y.stride() == out.stride() else out.copy_(y)


def _as(tensor: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(x.dtype)


def _triton(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    eps: float,
    silu: bool,
    beside: torch.Tensor | None = None,
    *,
    config: Mapping[str, int],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    from rocm_sd.kernels.triton.group_norm_silu import GroupNormSiluConfig, launch, one_pass  # noqa: PLC0415 -- needs Triton

    tiles = GroupNormSiluConfig.from_mapping(config)
    if beside is not None:
        N, C, H, W = x.shape[0], x.shape[1] + beside.shape[1], *x.shape[2:]
        if one_pass(tiles, H * W, C // groups):
            # A workgroup that holds a whole group would read it in two pieces; maps that small are soon copied.
            x, beside = joined(x, beside), None
        else:
            out = torch.empty((N, C, H, W), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    out = _allocate(x) if out is None else out
    if out.numel():
        weight, bias, add = (None if t is None else t.contiguous() for t in (weight, bias, add))
        parts = tuple(t.contiguous(memory_format=torch.channels_last) for t in (x, beside) if t is not None)
        units = arch.device_facts(x.device).compute_units or 1
        launch(parts, out, groups, weight, bias, add, eps, silu, tiles, units)
    return out


def _triton_why_not(problem: Problem, device: torch.device) -> str | None:
    if problem["dtype"] == "float64":
        return "dtype float64"
    return triton_kernels.why_not(device)


def _hip(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    eps: float,
    silu: bool,
    beside: torch.Tensor | None = None,
    *,
    config: Mapping[str, int],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    from rocm_sd.kernels.hip.group_norm_silu import GroupNormSiluConfig, launch  # noqa: PLC0415 -- only where used

    x = joined(x, beside)
    out = _allocate(x) if out is None else out
    if x.numel():
        weight, bias, add = (None if t is None else t.to(x.dtype).contiguous() for t in (weight, bias, add))
        dense = x.contiguous(memory_format=torch.channels_last)
        units = arch.device_facts(x.device).compute_units or 1
        launch(
            dense, out, groups, weight, bias, add, eps, silu, GroupNormSiluConfig.from_mapping(config), units,
            hip_kernels.launcher_for(x.device),
        )  # fmt: skip
    return out


def _hip_why_not(problem: Problem, device: torch.device) -> str | None:
    if problem["dtype"] == "float64":
        return "dtype float64"
    if int(problem["c"]) * int(problem["hw"]) >= 2**31:
        return f"{problem['c']} channels of {problem['hw']} pixels: the offsets of a picture pass 32 bits"
    return hip_kernels.why_not(device)


OP = register(
    Op(
        name="group_norm_silu",
        summary="GroupNorm with the time embedding's add before it and SiLU after it, channels-last",
        implementations=(
            Implementation(STOCK, _stock, lambda _problem, _device: None),
            Implementation("triton", _triton, _triton_why_not),
            Implementation("hip", _hip, _hip_why_not, HIP),
        ),
        default_config={
            "whole_elements": 4096,
            "whole_warps": 4,
            "moments_channels": 64,
            "moments_rows": 16,
            "moments_warps": 4,
            "slices_per_cu": 4,
            "apply_channels": 64,
            "apply_rows": 16,
            "apply_warps": 4,
        },
        verification=VERIFICATION,
        tuning=TUNING,
    )
)


@torch.library.custom_op(
    "rocm_sd::group_norm_silu",
    mutates_args=(),
    schema=(
        "(Tensor x, int groups, Tensor? weight, Tensor? bias, Tensor? add, float eps, bool silu, "
        "str? implementation=None) -> Tensor"
    ),
)
def _op(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    eps: float,
    silu: bool,
    implementation: str | None = None,
) -> torch.Tensor:
    out: torch.Tensor = OP.run(problem(x, groups), x.device, implementation, x, groups, weight, bias, add, eps, silu)
    return out


@_op.register_fake
def _(x: torch.Tensor, *_arguments: Any, **_named: Any) -> torch.Tensor:
    return _allocate(x)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001 -- torch's signature
    x, groups, weight, bias, add, eps, silu = inputs[:7]
    ctx.save_for_backward(x, weight, bias, add)
    ctx.groups, ctx.eps, ctx.silu = groups, eps, silu


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Recompute through stock ops what inference never stores, then the closed form, in float32 or wider."""
    x, weight, bias, add = ctx.saved_tensors
    N, C, H, W = x.shape
    wide = torch.promote_types(x.dtype, torch.float32)

    def grouped(t: torch.Tensor) -> torch.Tensor:
        return t.reshape(N, ctx.groups, C // ctx.groups, H * W)

    def per_channel(t: torch.Tensor) -> torch.Tensor:
        return t.to(wide).reshape(1, ctx.groups, C // ctx.groups, 1)

    h = x.to(wide) if add is None else x.to(wide) + add.to(wide)[:, :, None, None]
    variance, mean = torch.var_mean(grouped(h), dim=(2, 3), correction=0, keepdim=True)
    rstd = (variance + ctx.eps).rsqrt()
    normal = (grouped(h) - mean) * rstd
    d_affine = grouped(grad.to(wide))
    if ctx.silu:
        affine = normal if weight is None else normal * per_channel(weight)
        affine = affine if bias is None else affine + per_channel(bias)
        gate = torch.sigmoid(affine)
        d_affine = d_affine * gate * (1 + affine * (1 - gate))
    d_normal = d_affine if weight is None else d_affine * per_channel(weight)
    centred = d_normal - d_normal.mean(dim=(2, 3), keepdim=True)
    d_h = rstd * (centred - normal * (d_normal * normal).mean(dim=(2, 3), keepdim=True))
    d_x = d_h.reshape(N, C, H, W)
    return (
        d_x.to(x.dtype),
        None,
        None if weight is None else (d_affine * normal).sum(dim=(0, 3)).reshape(C).to(weight.dtype),
        None if bias is None else d_affine.sum(dim=(0, 3)).reshape(C).to(bias.dtype),
        None if add is None else d_x.sum(dim=(2, 3)).to(add.dtype),
        None,
        None,
        None,
    )


_op.register_autograd(_backward, setup_context=_setup_context)
