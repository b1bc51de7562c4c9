"""y = conv2d(x * x_scale, weight * weight_scale) + bias + add + residual, of x and weight in 8 bits, channels-last.

The convolution of two int8 or two fp8 tensors, with both scales and the adds in its epilogue: W8A8. One scale holds for
all of x: pixels with scales of their own could not be summed over the taps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from rocm_sd.errors import Unsupported, require_one_of
from rocm_sd.kernels import triton
from rocm_sd.kernels.configs.conv2d_8bit import Conv2d8bitConfig
from rocm_sd.ops.conv2d.workload import output_size
from rocm_sd.ops.conv2d_8bit.workload import TUNING, VERIFICATION
from rocm_sd.ops.defining import define
from rocm_sd.ops.definition import UP_TO_FLOAT32, Implementation, where
from rocm_sd.ops.eight_bits import DTYPES, FORMATS, multiplied
from rocm_sd.ops.layouts import channels_last, dense, is_channels_last, is_dense
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from rocm_sd.ops.layouts import Part

__all__ = ["OP", "conv2d_8bit"]

_KERNELS = (1, 3)


def conv2d_8bit(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    add: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    stride: int = 1,
    padding: int = 0,
    dtype: str = "float16",
    implementation: str | None = None,
) -> torch.Tensor:
    """y = conv2d(x * x_scale, weight * weight_scale) + bias + add + residual.

    x: [N, Cin, H, W] of any strides and weight: [Cout, Cin, k, k], k 1 or 3, both int8, float8_e4m3fn or
    float8_e4m3fnuz; x_scale: float32 without dimensions; weight_scale: [Cout], float32, or one for all; bias: [Cout];
    add: [N, Cout]; residual: [N, Cout, Ho, Wo]; y: like residual, channels-last, of `dtype`. It has no gradient.
    `implementation` names one and never falls back; without it the tuning data decides.
    """
    given = x, x_scale, weight, weight_scale, bias, add, residual, stride, padding, dtype
    bound = OP.bound(implementation, *given)
    if bound is not None:
        return bound(*given)
    require_one_of("dtype", dtype, DTYPES)
    _validate(x, x_scale, weight, weight_scale, stride, padding)
    shape = _shape(x, weight, stride, padding)
    if min(shape[2:]) < 1:
        raise Unsupported(OP.name, f"a kernel of {weight.shape[2]} on {tuple(x.shape[2:])} pixels, padding {padding}")
    OP.require_shape("bias", bias, shape[1:2])
    OP.require_shape("add", add, shape[:2])
    OP.require_shape("residual", residual, shape)
    return OP.call(*given, implementation=implementation)


def _validate(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, stride: int, padding: int) -> None:
    if x.dim() != 4 or weight.dim() != 4:
        raise Unsupported(OP.name, f"{x.dim()} and {weight.dim()} dimensions: it takes [N, Cin, H, W] and a weight")
    Cout, Cin, height, width = weight.shape
    if Cin != x.shape[1] or not Cin * Cout:
        raise Unsupported(OP.name, f"a weight for {Cin} channels on x of {x.shape[1]}: groups are not taken")
    if height != width or height not in _KERNELS:
        raise Unsupported(OP.name, f"a kernel of {height}x{width}: it takes 1x1 and 3x3")
    if stride < 1 or padding < 0:
        raise Unsupported(OP.name, f"stride {stride} with padding {padding}")
    for name, scale in (("x_scale", x_scale), ("weight_scale", weight_scale)):
        if scale.dtype is not torch.float32:
            raise Unsupported(OP.name, f"{name} of {scale.dtype}: it takes float32")
    OP.require_shape("x_scale", x_scale, ())
    if weight_scale.dim():
        OP.require_shape("weight_scale", weight_scale, (Cout,))


def _shape(x: Tensor, weight: Tensor, stride: int, padding: int) -> tuple[int, int, int, int]:
    kernel = weight.shape[2]
    height, width = (output_size(size, kernel, stride, padding) for size in x.shape[2:])
    return x.shape[0], weight.shape[0], height, width


def _allocate(x: Tensor, weight: Tensor, stride: int, padding: int, dtype: str) -> Tensor:
    shape, wide = _shape(x, weight, stride, padding), getattr(torch, dtype)
    return torch.empty(shape, dtype=wide, device=x.device, memory_format=torch.channels_last)


def _stock(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Part, add: Part, residual: Part,
    stride: int, padding: int, dtype: str,
) -> Tensor:  # fmt: skip
    """Both as they were before 8 bits, convolved in `dtype`."""
    wide: torch.dtype = getattr(torch, dtype)
    scales = weight_scale.view(-1, 1, 1, 1) if weight_scale.dim() else weight_scale
    left, right = (x.to(torch.float32) * x_scale).to(wide), (weight.to(torch.float32) * scales).to(wide)
    y = F.conv2d(left, right, None if bias is None else bias.to(wide), stride, padding)
    y = y if add is None else y + add.to(wide)[:, :, None, None]
    y = y if residual is None else y + residual.to(wide)
    return _allocate(x, weight, stride, padding, dtype).copy_(y)


def _triton(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Part, add: Part, residual: Part,
    stride: int, padding: int, dtype: str, *, config: Conv2d8bitConfig,
) -> Tensor:  # fmt: skip
    out = _allocate(x, weight, stride, padding, dtype)
    if out.numel():
        added = None if residual is None else channels_last(residual)
        left, right = channels_last(x), channels_last(weight)
        parts = dense(weight_scale), out, dense(bias), dense(add), added
        triton.launch_op("conv2d_8bit", x.device, left, x_scale, right, *parts, stride, padding, config)
    return out


def _bind(
    x: Tensor, _x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Part, add: Part, residual: Part,
    stride: int, padding: int, dtype: str, *, config: Conv2d8bitConfig,
) -> Callable[..., Tensor] | None:  # fmt: skip
    if not x.numel() or not is_channels_last(x, weight, residual) or not is_dense(bias, add, weight_scale):
        return None
    shape = _shape(x, weight, stride, padding)
    launch = triton.bind_op(
        "conv2d_8bit", x, weight, weight_scale, shape, bias, add, residual, stride, padding, config
    )  # fmt: skip
    if launch is None:
        return None

    def bound(
        x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Part, add: Part, residual: Part,
        *_rest: object,
    ) -> Tensor:  # fmt: skip
        out = _allocate(x, weight, stride, padding, dtype)
        launch(x, x_scale, weight, weight_scale, bias, add, residual, out)
        return out

    return bound


_triton_why_not = multiplied(where(triton, UP_TO_FLOAT32))

OP = define(
    conv2d_8bit,
    summary="convolution of int8 or fp8 maps, with scales, bias, time embedding and residual in its epilogue (W8A8)",
    family="convolution",
    implementations=(
        Implementation(STOCK, _stock),
        Implementation("triton", _triton, _triton_why_not, default=Conv2d8bitConfig(), fuses_adds=True, bind=_bind),
    ),
    allocate=_allocate,
    backward=None,
    dtypes=FORMATS,
    same_dtype=("weight",),
    verification=VERIFICATION,
    tuning=TUNING,
)
