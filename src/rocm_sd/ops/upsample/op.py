"""y = x enlarged by a whole number, nearest or bilinear, channels-last in and out.

It enlarges with coalesced reads and writes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from rocm_sd.errors import InvalidOption, Unsupported
from rocm_sd.kernels import hip, triton
from rocm_sd.kernels.configs.upsample import UpsampleConfig
from rocm_sd.ops.defining import Saved, define
from rocm_sd.ops.definition import UP_TO_FLOAT32, Implementation, where
from rocm_sd.ops.layouts import channels_last, is_channels_last
from rocm_sd.ops.upsample.workload import HIP, TUNING, VERIFICATION
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from torch import Tensor

    from rocm_sd.ops.layouts import Part
    from rocm_sd.tuning import Problem

__all__ = ["OP", "upsample"]

MODES = ("nearest", "bilinear")


def upsample(x: torch.Tensor, scale: int = 2, mode: str = "nearest", implementation: str | None = None) -> torch.Tensor:
    """y = F.interpolate(x, scale_factor=scale, mode=mode); x: [N, C, H, W] of any strides, H and W at least 1.

    fp16, bf16, fp32 or fp64; scale: a whole number from 1; mode: nearest, or bilinear with align_corners=False; y: x's
    dtype, channels-last. `implementation` names one and never falls back; without it the tuning data decides.
    """
    bound = OP.bound(implementation, x, scale, mode)
    if bound is not None:
        return bound(x, scale, mode)
    if x.dim() != 4 or not all(x.shape[2:]):
        raise Unsupported(OP.name, f"x of shape {tuple(x.shape)}: it takes [N, C, H, W] with pixels")
    if not isinstance(scale, int) or scale < 1:
        raise Unsupported(OP.name, f"scale {scale}", hint="Use a whole number from 1.")
    if mode not in MODES:
        raise InvalidOption("upsample mode", mode, list(MODES))
    return OP.call(x, scale, mode, implementation=implementation)


def _allocate(x: Tensor, scale: int) -> Tensor:
    N, C, H, W = x.shape
    return x.new_empty((N, scale * H, scale * W, C)).permute(0, 3, 1, 2)


def _stock(x: Tensor, scale: int, mode: str) -> Tensor:
    if not x.numel():
        return _allocate(x, scale)
    corners = None if mode == "nearest" else False
    y = F.interpolate(channels_last(x), scale_factor=scale, mode=mode, align_corners=corners)
    out = _allocate(x, scale)
    # Of one channel or one pixel, torch gives contiguous strides.
    return y if y.stride() == out.stride() else out.copy_(y)


def _by_kernel(
    language: ModuleType, x: Tensor, scale: int, mode: str, *, config: UpsampleConfig | None = None
) -> Tensor:
    out = _allocate(x, scale)
    if x.numel():
        given = (channels_last(x), out, scale, mode, *(() if config is None else (config,)))
        language.launch_op("upsample", x.device, *given)
    return out


def _bind(x: Tensor, scale: int, mode: str, *, config: UpsampleConfig) -> Callable[..., Tensor] | None:
    if not x.numel() or not is_channels_last(x):
        return None
    launch = triton.bind_op("upsample", x, scale, mode, config)
    if launch is None:
        return None

    def bound(x: Tensor, scale: int, _mode: str) -> Tensor:
        out = _allocate(x, scale)
        launch(x, out)
        return out

    return bound


def _too_far(problem: Problem) -> str | None:
    if int(problem["scale"]) > 8:
        return f"scale {problem['scale']}: above 8 its unrolled code outgrows the instruction cache"
    return None


def _too_far_or_large(problem: Problem) -> str | None:
    if int(problem["scale"]) ** 2 * int(problem["c"]) * int(problem["hw"]) >= 2**31:
        return _too_far(problem) or f"{problem['hw']} pixels: the offsets of a picture pass 32 bits"
    return _too_far(problem)


def _backward(saved: Saved, grad: Tensor) -> Mapping[str, Part]:
    """The transpose of the enlargement: it needs none of x's values."""
    scale, mode = saved.scale, saved.mode
    N, C, H, W = grad.shape[0], grad.shape[1], grad.shape[2] // scale, grad.shape[3] // scale
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    if mode == "nearest":
        return {"x": wide.reshape(N, C, H, scale, W, scale).sum(dim=(3, 5))}
    return {"x": torch.einsum("ncij,hi,wj->nchw", wide, _weights(H, scale, wide), _weights(W, scale, wide))}


def _weights(size: int, scale: int, like: Tensor) -> Tensor:
    """[size, scale * size]: what each pixel of a line gives to each pixel of the longer line."""
    one_hot = torch.eye(size, dtype=like.dtype, device=like.device)
    return F.interpolate(one_hot[None], scale_factor=scale, mode="linear", align_corners=False)[0]


OP = define(
    upsample,
    summary="nearest and bilinear enlargement by a whole number, channels-last",
    family="elementwise",
    implementations=(
        Implementation(STOCK, _stock),
        Implementation(
            "triton",
            partial(_by_kernel, triton),
            where(triton, UP_TO_FLOAT32, _too_far),
            default=UpsampleConfig(),
            bind=_bind,
        ),
        Implementation("hip", partial(_by_kernel, hip), where(hip, UP_TO_FLOAT32, _too_far_or_large), HIP),
    ),
    allocate=_allocate,
    backward=_backward,
    saves=(),
    verification=VERIFICATION,
    tuning=TUNING,
)
