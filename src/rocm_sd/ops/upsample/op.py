"""y = x enlarged by a whole number, nearest or bilinear, channels-last in and out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from rocm_sd.errors import InvalidOption, Unsupported
from rocm_sd.kernels import hip as hip_kernels
from rocm_sd.kernels import triton as triton_kernels
from rocm_sd.ops.registry import Implementation, Op, needs_no_dispatcher, register
from rocm_sd.ops.upsample.workload import HIP, TUNING, VERIFICATION, problem
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.tuning import Problem

__all__ = ["OP", "upsample"]

MODES = ("nearest", "bilinear")


def upsample(x: torch.Tensor, scale: int = 2, mode: str = "nearest", implementation: str | None = None) -> torch.Tensor:
    """y = F.interpolate(x, scale_factor=scale, mode=mode); x: [N, C, H, W] of any strides, H and W at least 1.

    fp16, bf16, fp32 or fp64; scale: a whole number from 1; mode: nearest, or bilinear with align_corners=False; y: x's
    dtype, channels-last. `implementation` names one and never falls back; without it the tuning data decides.
    """
    if x.dim() != 4 or not all(x.shape[2:]):
        raise Unsupported(OP.name, f"x of shape {tuple(x.shape)}: it takes [N, C, H, W] with pixels")
    if x.dtype not in {torch.float16, torch.bfloat16, torch.float32, torch.float64}:
        raise Unsupported(OP.name, f"dtype {x.dtype}", hint="Use float16, bfloat16, float32 or float64.")
    if not isinstance(scale, int) or scale < 1:
        raise Unsupported(OP.name, f"scale {scale}", hint="Use a whole number from 1.")
    if mode not in MODES:
        raise InvalidOption("upsample mode", mode, list(MODES))
    if needs_no_dispatcher(x):
        out: torch.Tensor = OP.run(problem(x, scale, mode), x.device, implementation, x, scale, mode)
        return out
    y: torch.Tensor = torch.ops.rocm_sd.upsample(x, scale, mode, implementation)
    return y


def _allocate(x: torch.Tensor, scale: int) -> torch.Tensor:
    N, C, H, W = x.shape
    return x.new_empty((N, scale * H, scale * W, C)).permute(0, 3, 1, 2)


def _stock(x: torch.Tensor, scale: int, mode: str, *, config: Mapping[str, int]) -> torch.Tensor:  # noqa: ARG001
    if not x.numel():
        return _allocate(x, scale)
    dense = x.contiguous(memory_format=torch.channels_last)
    y = F.interpolate(dense, scale_factor=scale, mode=mode, align_corners=None if mode == "nearest" else False)
    out = _allocate(x, scale)
    # Of one channel or one pixel, torch gives contiguous strides.
    return y if y.stride() == out.stride() else out.copy_(y)


def _triton(x: torch.Tensor, scale: int, mode: str, *, config: Mapping[str, int]) -> torch.Tensor:
    from rocm_sd.kernels.triton.upsample import UpsampleConfig, launch  # noqa: PLC0415 -- needs Triton

    out = _allocate(x, scale)
    if x.numel():
        dense = x.contiguous(memory_format=torch.channels_last)
        launch(dense, out, scale, mode, UpsampleConfig.from_mapping(config))
    return out


def _triton_why_not(problem: Problem, device: torch.device) -> str | None:
    if problem["dtype"] == "float64":
        return "dtype float64"
    if int(problem["scale"]) > 8:
        return f"scale {problem['scale']}: above 8 its unrolled code outgrows the instruction cache"
    return triton_kernels.why_not(device)


def _hip(x: torch.Tensor, scale: int, mode: str, *, config: Mapping[str, int]) -> torch.Tensor:  # noqa: ARG001
    from rocm_sd.kernels.hip.upsample import launch  # noqa: PLC0415 -- only where it is used

    out = _allocate(x, scale)
    if x.numel():
        launch(x.contiguous(memory_format=torch.channels_last), out, scale, mode, hip_kernels.launcher_for(x.device))
    return out


def _hip_why_not(problem: Problem, device: torch.device) -> str | None:
    if problem["dtype"] == "float64":
        return "dtype float64"
    scale = int(problem["scale"])
    if scale > 8:
        return f"scale {scale}: above 8 its unrolled code outgrows the instruction cache"
    if scale**2 * int(problem["c"]) * int(problem["hw"]) >= 2**31:
        return f"{problem['hw']} pixels: the offsets of a picture pass 32 bits"
    return hip_kernels.why_not(device)


OP = register(
    Op(
        name="upsample",
        summary="nearest and bilinear enlargement by a whole number, channels-last",
        implementations=(
            Implementation(STOCK, _stock, lambda _problem, _device: None),
            Implementation("triton", _triton, _triton_why_not),
            Implementation("hip", _hip, _hip_why_not, HIP),
        ),
        default_config={"rows": 16, "block_c": 64, "warps": 4},
        verification=VERIFICATION,
        tuning=TUNING,
    )
)


@torch.library.custom_op(
    "rocm_sd::upsample",
    mutates_args=(),
    schema="(Tensor x, int scale, str mode, str? implementation=None) -> Tensor",
)
def _op(x: torch.Tensor, scale: int, mode: str, implementation: str | None = None) -> torch.Tensor:
    out: torch.Tensor = OP.run(problem(x, scale, mode), x.device, implementation, x, scale, mode)
    return out


@_op.register_fake
def _(x: torch.Tensor, scale: int, *_arguments: Any, **_named: Any) -> torch.Tensor:
    return _allocate(x, scale)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001 -- torch's signature
    x, ctx.scale, ctx.mode = inputs[:3]
    ctx.shape = x.shape


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The transpose of the enlargement: it needs x's shape and none of its values."""
    N, C, H, W = ctx.shape
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    if ctx.mode == "nearest":
        d_x = wide.reshape(N, C, H, ctx.scale, W, ctx.scale).sum(dim=(3, 5))
    else:
        d_x = torch.einsum("ncij,hi,wj->nchw", wide, _weights(H, ctx.scale, wide), _weights(W, ctx.scale, wide))
    return d_x.to(grad.dtype), None, None, None


def _weights(size: int, scale: int, like: torch.Tensor) -> torch.Tensor:
    """[size, scale * size]: what each pixel of a line gives to each pixel of the longer line."""
    one_hot = torch.eye(size, dtype=like.dtype, device=like.device)
    return F.interpolate(one_hot[None], scale_factor=scale, mode="linear", align_corners=False)[0]


_op.register_autograd(_backward, setup_context=_setup_context)
