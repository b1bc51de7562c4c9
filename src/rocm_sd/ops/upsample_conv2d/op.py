"""y = conv2d(nearest 2x of x, weight, padding=1) + bias, channels-last: every upsampler of a UNet and a VAE.

It is a nearest 2x enlargement and a 3x3 convolution as four 2x2 convolutions with summed weights, one for each output
parity: 4/9 of the products, and no enlarged map in memory. `parity_weights` makes the weights once.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from rocm_sd.errors import Unsupported
from rocm_sd.kernels import hip, triton
from rocm_sd.kernels.configs.upsample_conv2d import UpsampleConv2dConfig
from rocm_sd.ops.defining import Saved, define
from rocm_sd.ops.definition import HALVES, UP_TO_FLOAT32, Implementation, where
from rocm_sd.ops.layouts import as_dtype, channels_last, dense, is_channels_last, is_dense
from rocm_sd.ops.upsample_conv2d.parity import parity_weights
from rocm_sd.ops.upsample_conv2d.workload import HIP, HIP_SMALLEST, TUNING, VERIFICATION, variant
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from torch import Tensor

    from rocm_sd.kernels.config import Config
    from rocm_sd.kernels.hip.upsample_conv2d import Conv2dConfig
    from rocm_sd.ops.layouts import Part

__all__ = ["OP", "parity_weights", "upsample_conv2d"]


def upsample_conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    parity_weight: torch.Tensor | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """y = conv2d(nearest 2x of x, weight, padding=1) + bias; x: [N, Cin, H, W] of any strides, floating point.

    weight: [Cout, Cin, 3, 3]; bias: [Cout]; y: [N, Cout, 2H, 2W] in x's dtype, channels-last. `parity_weight` is
    parity_weights(weight), kept by the caller so that it is not summed anew at every call; gradients go to `weight`.
    `implementation` names one and never falls back; without it the tuning data decides.
    """
    bound = OP.bound(implementation, x, weight, bias, parity_weight)
    if bound is not None:
        return bound(x, weight, bias, parity_weight)
    if x.dim() != 4:
        raise Unsupported(OP.name, f"x of {x.dim()} dimensions: it takes [N, Cin, H, W]")
    if weight.dim() != 4 or weight.shape[2:] != (3, 3):
        raise Unsupported(OP.name, f"weight of shape {tuple(weight.shape)}: it takes [Cout, Cin, 3, 3]")
    Cin = x.shape[1]
    Cout, taken = weight.shape[:2]
    if taken != Cin or not Cin * Cout:
        raise Unsupported(OP.name, f"a weight for {taken} channels on x of {Cin}: groups are not taken")
    OP.require_shape("bias", bias, (Cout,))
    OP.require_shape("parity_weight", parity_weight, (4, Cout, 2, 2, Cin))
    return OP.call(x, weight, bias, parity_weight, implementation=implementation)


def _allocate(x: Tensor, weight: Tensor) -> Tensor:
    N, _, H, W = x.shape
    size = (N, weight.shape[0], 2 * H, 2 * W)
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def _parity(x: Tensor, weight: Tensor, parity_weight: Part) -> Tensor:
    given = parity_weights(weight) if parity_weight is None else parity_weight
    return given.to(x.dtype).contiguous()


def _stock(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    parity_weight: torch.Tensor | None,  # noqa: ARG001 -- stock torch has no use for it
) -> torch.Tensor:
    if not x.numel():
        return _allocate(x, weight)
    enlarged = F.interpolate(channels_last(x), scale_factor=2.0, mode="nearest")
    y = F.conv2d(enlarged, channels_last(weight.to(x.dtype)), as_dtype(bias, x.dtype), padding=1)
    _, Cout, Ho, Wo = y.shape
    # Some of torch's backends answer in another layout.
    as_promised = y.stride() == (Cout * Ho * Wo, 1, Wo * Cout, Cout)
    return y if as_promised else _allocate(x, weight).copy_(y)


def _parity_library(x: Tensor, weight: Tensor, bias: Part, parity_weight: Part) -> Tensor:
    from rocm_sd.kernels.triton.upsample_conv2d import interleave  # noqa: PLC0415 -- needs Triton

    out = _allocate(x, weight)
    if out.numel():
        picture, sums = channels_last(x), _parity(x, weight, parity_weight)
        # The lines of one parity at a time: with all four side by side, a VAE's memory would peak here.
        for a in range(2):
            # [2, Cout, 2, 2, Cin] in memory is a channels-last filter of 2 * Cout channels as it stands.
            filters = sums[2 * a : 2 * a + 2].flatten(0, 1).permute(0, 3, 1, 2)
            parts = channels_last(F.conv2d(picture, filters, padding=1))
            interleave(parts, out, dense(bias), a)
            # Before the next are computed.
            del parts
    return out


def _by_kernel(
    language: ModuleType,
    x: Tensor,
    weight: Tensor,
    bias: Part,
    parity_weight: Part,
    *,
    config: UpsampleConv2dConfig | Conv2dConfig,
) -> Tensor:
    out = _allocate(x, weight)
    if out.numel():
        # Kernels in HIP take all in one dtype.
        given = (
            channels_last(x),
            _parity(x, weight, parity_weight),
            out,
            dense(bias, x.dtype if language is hip else None),
        )
        language.launch_op("upsample_conv2d", x.device, *given, config)
    return out


def _bind(
    x: Tensor, weight: Tensor, bias: Part, parity_weight: Part, *, config: UpsampleConv2dConfig
) -> Callable[..., Tensor] | None:
    if not x.numel() or not is_channels_last(x) or not is_dense(bias):
        return None
    launch = triton.bind_op("upsample_conv2d", x, _parity(x, weight, parity_weight), bias, config)
    if launch is None:
        return None

    def bound(x: Tensor, weight: Tensor, bias: Part, parity_weight: Part) -> Tensor:
        out = _allocate(x, weight)
        launch(x, _parity(x, weight, parity_weight), out, bias)
        return out

    return bound


def _sums_bytes(arguments: tuple[Any, ...], _config: Config, _device: torch.device) -> int:
    """The sums of the weights for each parity, where the caller keeps none."""
    x, weight, _, parity_weight = arguments
    return 16 * int(weight.shape[0] * weight.shape[1] * x.itemsize) if parity_weight is None else 0


def _parts_bytes(arguments: tuple[Any, ...], config: Config, device: torch.device) -> int:
    """The sums, and two of the four parities side by side."""
    x, weight, *_ = arguments
    N, _, H, W = x.shape
    return _sums_bytes(arguments, config, device) + 2 * int(N * weight.shape[0] * (H + 1) * (W + 1) * x.itemsize)


def _backward(saved: Saved, grad: Tensor) -> Mapping[str, Part]:
    """The library's own gradients of the two steps; the parity weights follow from the weight and get none."""
    x, weight, wanted = saved.x, saved.weight, saved.wanted
    enlarged = F.interpolate(channels_last(x), scale_factor=2.0, mode="nearest")
    d_enlarged, d_weight, _ = torch.ops.aten.convolution_backward(
        grad, enlarged, channels_last(weight.to(x.dtype)), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1,
        ["x" in wanted, "weight" in wanted, False],
    )  # fmt: skip
    wide = torch.promote_types(grad.dtype, torch.float32)
    return {
        # Four pixels of the enlarged picture were one.
        "x": 4 * F.avg_pool2d(d_enlarged, 2) if "x" in wanted else None,
        "weight": d_weight,
        "bias": grad.sum(dim=(0, 2, 3), dtype=wide) if "bias" in wanted else None,
    }


OP = define(
    upsample_conv2d,
    summary="nearest 2x upsampling and 3x3 convolution as four 2x2 convolutions, channels-last",
    family="convolution",
    implementations=(
        Implementation(STOCK, _stock),
        Implementation("parity_library", _parity_library, where(triton, UP_TO_FLOAT32), scratch_bytes=_parts_bytes),
        Implementation(
            "triton",
            partial(_by_kernel, triton),
            where(triton, HALVES),
            default=UpsampleConv2dConfig(),
            scratch_bytes=_sums_bytes,
            variant=variant,
            bind=_bind,
        ),
        Implementation(
            "hip",
            partial(_by_kernel, hip),
            where(hip, HALVES),
            HIP,
            default=HIP_SMALLEST,
            scratch_bytes=_sums_bytes,
            variant=variant,
        ),
    ),
    allocate=_allocate,
    backward=_backward,
    saves=("x", "weight"),
    derived={"parity_weight": lambda _x, weight, *_rest: parity_weights(weight)},
    verification=VERIFICATION,
    tuning=TUNING,
)
