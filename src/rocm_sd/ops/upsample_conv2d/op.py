"""y = conv2d(nearest 2x of x, weight, padding=1) + bias, channels-last: every upsampler of a UNet and a VAE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from rocm_sd.errors import Unsupported
from rocm_sd.kernels import hip as hip_kernels
from rocm_sd.kernels import triton as triton_kernels
from rocm_sd.ops.registry import Implementation, Op, needs_no_dispatcher, register
from rocm_sd.ops.upsample_conv2d.parity import parity_weights
from rocm_sd.ops.upsample_conv2d.workload import HIP, TUNING, VERIFICATION, problem
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.tuning import Problem

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
    _validate(x, weight, bias, parity_weight)
    if needs_no_dispatcher(x, weight, bias, parity_weight):
        out: torch.Tensor = OP.run(problem(x, weight), x.device, implementation, x, weight, bias, parity_weight)
        return out
    y: torch.Tensor = torch.ops.rocm_sd.upsample_conv2d(x, weight, bias, parity_weight, implementation)
    return y


def _validate(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, parity_weight: torch.Tensor | None
) -> None:
    if x.dim() != 4:
        raise Unsupported(OP.name, f"x of {x.dim()} dimensions: it takes [N, Cin, H, W]")
    if weight.dim() != 4 or tuple(weight.shape[2:]) != (3, 3):
        raise Unsupported(OP.name, f"weight of shape {tuple(weight.shape)}: it takes [Cout, Cin, 3, 3]")
    if x.dtype not in {torch.float16, torch.bfloat16, torch.float32, torch.float64}:
        raise Unsupported(OP.name, f"dtype {x.dtype}", hint="Use float16, bfloat16, float32 or float64.")
    Cin = x.shape[1]
    Cout, taken = weight.shape[:2]
    if taken != Cin or not Cin * Cout:
        raise Unsupported(OP.name, f"a weight for {taken} channels on x of {Cin}: groups are not taken")
    for name, tensor, shape in (
        ("bias", bias, (Cout,)),
        ("parity_weight", parity_weight, (4, Cout, 2, 2, Cin)),
        ("weight", weight, tuple(weight.shape)),
    ):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise Unsupported(OP.name, f"{name} of shape {tuple(tensor.shape)}: it takes {shape}")
        if tensor is not None and tensor.device != x.device:
            raise Unsupported(OP.name, f"x on {x.device} with {name} on {tensor.device}")


def _allocate(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    N, _, H, W = x.shape
    size = (N, weight.shape[0], 2 * H, 2 * W)
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def _parity(x: torch.Tensor, weight: torch.Tensor, parity_weight: torch.Tensor | None) -> torch.Tensor:
    given = parity_weights(weight) if parity_weight is None else parity_weight
    return given.to(x.dtype).contiguous()


def _stock(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    parity_weight: torch.Tensor | None,  # noqa: ARG001 -- stock torch has no use for it
    *,
    config: Mapping[str, int],  # noqa: ARG001 -- stock torch has nothing to configure
) -> torch.Tensor:
    if not x.numel():
        return _allocate(x, weight)
    enlarged = F.interpolate(_channels_last(x), scale_factor=2.0, mode="nearest")
    as_x = None if bias is None else bias.to(x.dtype)
    y = F.conv2d(enlarged, _channels_last(weight.to(x.dtype)), as_x, padding=1)
    _, Cout, Ho, Wo = y.shape
    # Some of torch's backends answer in another layout.
    dense = y.stride() == (Cout * Ho * Wo, 1, Wo * Cout, Cout)
    return y if dense else _allocate(x, weight).copy_(y)


def _parity_library(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    parity_weight: torch.Tensor | None,
    *,
    config: Mapping[str, int],  # noqa: ARG001 -- the library chooses for itself
) -> torch.Tensor:
    from rocm_sd.kernels.triton.upsample_conv2d import interleave  # noqa: PLC0415 -- needs Triton

    out = _allocate(x, weight)
    if out.numel():
        picture, sums = _channels_last(x), _parity(x, weight, parity_weight)
        # The lines of one parity at a time: with all four side by side, a VAE's memory would peak here.
        for a in range(2):
            # [2, Cout, 2, 2, Cin] in memory is a channels-last filter of 2 * Cout channels as it stands.
            filters = sums[2 * a : 2 * a + 2].flatten(0, 1).permute(0, 3, 1, 2)
            parts = _channels_last(F.conv2d(picture, filters, padding=1))
            interleave(parts, out, None if bias is None else bias.contiguous(), a)
            # Before the next are computed.
            del parts
    return out


def _triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    parity_weight: torch.Tensor | None,
    *,
    config: Mapping[str, int],
) -> torch.Tensor:
    from rocm_sd.kernels.triton.upsample_conv2d import UpsampleConv2dConfig, launch  # noqa: PLC0415 -- needs Triton

    out = _allocate(x, weight)
    if out.numel():
        launch(
            _channels_last(x),
            _parity(x, weight, parity_weight),
            out,
            None if bias is None else bias.contiguous(),
            UpsampleConv2dConfig.from_mapping(config),
        )
    return out


def _hip(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    parity_weight: torch.Tensor | None,
    *,
    config: Mapping[str, int],
) -> torch.Tensor:
    from rocm_sd.kernels.hip.upsample_conv2d import Conv2dConfig, launch  # noqa: PLC0415 -- only where used

    out = _allocate(x, weight)
    if out.numel():
        launch(
            _channels_last(x),
            _parity(x, weight, parity_weight),
            out,
            None if bias is None else bias.to(x.dtype).contiguous(),
            Conv2dConfig.from_mapping(config),
            hip_kernels.launcher_for(x.device),
        )
    return out


def _hip_why_not(problem: Problem, device: torch.device) -> str | None:
    if problem["dtype"] not in ("float16", "bfloat16"):
        return f"dtype {problem['dtype']}"
    return hip_kernels.why_not(device)


def _triton_why_not(problem: Problem, device: torch.device) -> str | None:
    if problem["dtype"] not in ("float16", "bfloat16"):
        return f"dtype {problem['dtype']}"
    return triton_kernels.why_not(device)


def _library_why_not(problem: Problem, device: torch.device) -> str | None:
    if problem["dtype"] == "float64":
        return "dtype float64"
    return triton_kernels.why_not(device)


OP = register(
    Op(
        name="upsample_conv2d",
        summary="nearest 2x upsampling and 3x3 convolution as four 2x2 convolutions, channels-last",
        implementations=(
            Implementation(STOCK, _stock, lambda _problem, _device: None),
            Implementation("parity_library", _parity_library, _library_why_not),
            Implementation("triton", _triton, _triton_why_not),
            Implementation("hip", _hip, _hip_why_not, HIP),
        ),
        default_config={
            "block_m": 64,
            "block_n": 64,
            "block_n2": 0,
            "block_k": 32,
            "group_m": 8,
            "warps": 4,
            "stages": 2,
        },
        verification=VERIFICATION,
        tuning=TUNING,
    )
)


@torch.library.custom_op(
    "rocm_sd::upsample_conv2d",
    mutates_args=(),
    schema=("(Tensor x, Tensor weight, Tensor? bias, Tensor? parity_weight, str? implementation=None) -> Tensor"),
)
def _op(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    parity_weight: torch.Tensor | None,
    implementation: str | None = None,
) -> torch.Tensor:
    out: torch.Tensor = OP.run(problem(x, weight), x.device, implementation, x, weight, bias, parity_weight)
    return out


@_op.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, *_arguments: Any, **_named: Any) -> torch.Tensor:
    return _allocate(x, weight)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001 -- torch's signature
    x, weight, bias = inputs[:3]
    ctx.save_for_backward(x, weight)
    ctx.bias = None if bias is None else bias.dtype


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The library's own gradients of the two steps; the parity weights follow from the weight and get none."""
    x, weight = ctx.saved_tensors
    wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    enlarged = F.interpolate(_channels_last(x), scale_factor=2.0, mode="nearest")
    d_enlarged, d_weight, _ = torch.ops.aten.convolution_backward(
        grad, enlarged, _channels_last(weight.to(x.dtype)), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1,
        [wants_x, wants_weight, False],
    )  # fmt: skip
    wide = torch.promote_types(grad.dtype, torch.float32)
    return (
        # Four pixels of the enlarged picture were one.
        4 * F.avg_pool2d(d_enlarged, 2) if wants_x else None,
        d_weight.to(weight.dtype) if wants_weight else None,
        grad.sum(dim=(0, 2, 3), dtype=wide).to(ctx.bias) if wants_bias else None,
        None,
        None,
    )


_op.register_autograd(_backward, setup_context=_setup_context)
