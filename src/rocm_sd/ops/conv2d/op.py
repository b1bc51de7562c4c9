"""y = conv2d(x, weight) + bias + add + residual, channels-last: every convolution of a UNet and a VAE and its adds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from rocm_sd.errors import Unsupported
from rocm_sd.kernels import hip as hip_kernels
from rocm_sd.kernels import triton as triton_kernels
from rocm_sd.ops.conv2d.workload import HIP, TUNING, VERIFICATION, output_size, problem
from rocm_sd.ops.joining import joined, require_alike
from rocm_sd.ops.registry import Implementation, Op, needs_no_dispatcher, register
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.tuning import Problem

__all__ = ["OP", "conv2d", "reads_two"]

_KERNELS = (1, 3)


def conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    add: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    stride: int = 1,
    padding: int = 0,
    implementation: str | None = None,
    beside: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = conv2d(x, weight) + bias + add + residual; x: [N, Cin, H, W] of any strides, fp16, bf16, fp32 or fp64.

    weight: [Cout, Cin, k, k], k 1 or 3, one group, no dilation; bias: [Cout]; add: [N, Cout], e.g. a time embedding;
    residual: [N, Cout, Ho, Wo]; y: like residual, in x's dtype, channels-last. x, weight and residual are copied
    where they are not channels-last. `implementation` names one and never falls back; without it the tuning data
    decides. `beside` has further input channels, which follow x's: where `reads_two`, they are never written beside
    each other.
    """
    if beside is not None:
        require_alike(OP.name, x, beside)
        if not needs_no_dispatcher(x, beside, weight, bias, add, residual):
            x, beside = joined(x, beside), None
    _validate(x, weight, bias, add, residual, stride, padding, beside)
    if needs_no_dispatcher(x, weight, bias, add, residual):
        out: torch.Tensor = _run(x, weight, bias, add, residual, stride, padding, implementation, beside)
        return out
    y: torch.Tensor = torch.ops.rocm_sd.conv2d(x, weight, bias, add, residual, stride, padding, implementation)
    return y


def reads_two(problem: Problem, device: torch.device) -> bool:
    """Whether the implementation that is chosen reads x and `beside` where they lie."""
    choice = OP.choose(problem, device)
    if choice.implementation != "triton":
        return False
    from rocm_sd.kernels.triton import conv2d as kernel  # noqa: PLC0415 -- needs Triton

    return kernel.reads_two(kernel.Conv2dConfig.from_mapping(choice.config), int(problem["kernel"]))


def _validate(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    residual: torch.Tensor | None,
    stride: int,
    padding: int,
    beside: torch.Tensor | None = None,
) -> None:
    if x.dim() != 4:
        raise Unsupported(OP.name, f"x of {x.dim()} dimensions: it takes [N, Cin, H, W]")
    if weight.dim() != 4:
        raise Unsupported(OP.name, f"weight of {weight.dim()} dimensions: it takes [Cout, Cin, k, k]")
    if x.dtype not in {torch.float16, torch.bfloat16, torch.float32, torch.float64}:
        raise Unsupported(OP.name, f"dtype {x.dtype}", hint="Use float16, bfloat16, float32 or float64.")
    N, Cin, H, W = x.shape
    Cin += 0 if beside is None else beside.shape[1]
    Cout, taken, height, width = weight.shape
    if taken != Cin or not Cin * Cout:
        raise Unsupported(OP.name, f"a weight for {taken} channels on x of {Cin}: groups are not taken")
    if height != width or height not in _KERNELS:
        raise Unsupported(OP.name, f"a kernel of {height}x{width}: it takes 1x1 and 3x3")
    if stride < 1 or padding < 0:
        raise Unsupported(OP.name, f"stride {stride} with padding {padding}")
    size = tuple(output_size(extent, height, stride, padding) for extent in (H, W))
    if min(size) < 1:
        raise Unsupported(OP.name, f"a {height}x{width} kernel on {H}x{W} pixels with padding {padding}")
    _validate_part(x, "weight", weight, tuple(weight.shape))
    _validate_part(x, "bias", bias, (Cout,))
    _validate_part(x, "add", add, (N, Cout))
    _validate_part(x, "residual", residual, (N, Cout, *size))


def _validate_part(x: torch.Tensor, name: str, tensor: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    if tensor is not None and tuple(tensor.shape) != shape:
        raise Unsupported(OP.name, f"{name} of shape {tuple(tensor.shape)}: it takes {shape}")
    if tensor is not None and tensor.device != x.device:
        raise Unsupported(OP.name, f"x on {x.device} with {name} on {tensor.device}")


def _run(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    residual: torch.Tensor | None,
    stride: int,
    padding: int,
    implementation: str | None,
    beside: torch.Tensor | None = None,
) -> Any:
    given = (x, weight, bias, add, residual, stride, padding, beside)
    return OP.run(problem(*given), x.device, implementation, *given)


def _allocate(x: torch.Tensor, weight: torch.Tensor, stride: int, padding: int) -> torch.Tensor:
    N, _, H, W = x.shape
    Cout, _, kernel, _ = weight.shape
    size = (output_size(extent, kernel, stride, padding) for extent in (H, W))
    return torch.empty((N, Cout, *size), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def _library(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: int, padding: int
) -> torch.Tensor:
    """torch's own convolution, in the layout that the op returns: some of its backends answer in another."""
    as_x = None if bias is None else bias.to(x.dtype)
    y = F.conv2d(_channels_last(x), _channels_last(weight.to(x.dtype)), as_x, stride, padding)
    _, Cout, Ho, Wo = y.shape
    dense = y.stride() == (Cout * Ho * Wo, 1, Wo * Cout, Cout)
    return y if dense else _allocate(x, weight, stride, padding).copy_(y)


def _stock(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    residual: torch.Tensor | None,
    stride: int,
    padding: int,
    beside: torch.Tensor | None = None,
    *,
    config: Mapping[str, int],  # noqa: ARG001 -- stock torch has nothing to configure
) -> torch.Tensor:
    x = joined(x, beside)
    y = _library(x, weight, bias, stride, padding)
    if add is not None:
        y += add[:, :, None, None].to(x.dtype)
    if residual is not None:
        y += residual.to(x.dtype)
    return y


def _library_epilogue(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    residual: torch.Tensor | None,
    stride: int,
    padding: int,
    beside: torch.Tensor | None = None,
    *,
    config: Mapping[str, int],  # noqa: ARG001 -- the library chooses for itself
) -> torch.Tensor:
    x = joined(x, beside)
    y = _library(x, weight, None, stride, padding)
    _finish(y, bias, add, residual)
    return y


def _library_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    residual: torch.Tensor | None,
    stride: int,
    padding: int,
    beside: torch.Tensor | None = None,
    *,
    config: Mapping[str, int],  # noqa: ARG001 -- the library chooses for itself
) -> torch.Tensor:
    x = joined(x, beside)
    out = _allocate(x, weight, stride, padding)
    N, Cin, H, W = x.shape
    rows = _channels_last(x).permute(0, 2, 3, 1).reshape(N * H * W, Cin)
    target = out.permute(0, 2, 3, 1).view(N * H * W, out.shape[1])
    filters = weight.to(x.dtype).reshape(-1, Cin).t()
    if bias is not None and add is None and residual is None:
        # The one epilogue that the libraries have themselves.
        torch.addmm(bias.to(x.dtype), rows, filters, out=target)
        return out
    torch.mm(rows, filters, out=target)
    _finish(out, bias, add, residual)
    return out


def _finish(
    y: torch.Tensor, bias: torch.Tensor | None, add: torch.Tensor | None, residual: torch.Tensor | None
) -> None:
    from rocm_sd.kernels.triton.conv2d import finish  # noqa: PLC0415 -- needs Triton

    if y.numel() and not (bias is None and add is None and residual is None):
        bias, add = (None if t is None else t.contiguous() for t in (bias, add))
        finish(y, y, bias, add, None if residual is None else _channels_last(residual))


def _triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    residual: torch.Tensor | None,
    stride: int,
    padding: int,
    beside: torch.Tensor | None = None,
    *,
    config: Mapping[str, int],
) -> torch.Tensor:
    from rocm_sd.kernels.triton.conv2d import Conv2dConfig, launch, reads_two  # noqa: PLC0415 -- needs Triton

    tiles = Conv2dConfig.from_mapping(config)
    if beside is not None and not reads_two(tiles, weight.shape[2]):
        x, beside = joined(x, beside), None
    out = _allocate(x, weight, stride, padding)
    if out.numel():
        bias, add = (None if t is None else t.contiguous() for t in (bias, add))
        residual = None if residual is None else _channels_last(residual)
        launch(
            _channels_last(x),
            _channels_last(weight.to(x.dtype)),
            out,
            bias,
            add,
            residual,
            stride,
            padding,
            tiles,
            None if beside is None else _channels_last(beside),
        )
    return out


def _hip(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    residual: torch.Tensor | None,
    stride: int,
    padding: int,
    beside: torch.Tensor | None = None,
    *,
    config: Mapping[str, int],
) -> torch.Tensor:
    from rocm_sd.kernels.hip.conv2d import Conv2dConfig, launch  # noqa: PLC0415 -- only where used

    x = joined(x, beside)
    out = _allocate(x, weight, stride, padding)
    if out.numel():
        bias, add = (None if t is None else t.to(x.dtype).contiguous() for t in (bias, add))
        residual = None if residual is None else _channels_last(residual.to(x.dtype))
        launch(
            _channels_last(x), _channels_last(weight.to(x.dtype)), out, bias, add, residual, stride, padding,
            Conv2dConfig.from_mapping(config), hip_kernels.launcher_for(x.device),
        )  # fmt: skip
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


def _library_gemm_why_not(problem: Problem, device: torch.device) -> str | None:
    if (problem["kernel"], problem["stride"], problem["padding"]) != (1, 1, 0):
        return "anything but a 1x1 kernel with stride 1 and no padding"
    return _library_why_not(problem, device)


OP = register(
    Op(
        name="conv2d",
        summary="3x3 and 1x1 convolution with bias, time embedding and residual added in the same pass, channels-last",
        implementations=(
            Implementation(STOCK, _stock, lambda _problem, _device: None),
            Implementation("library_epilogue", _library_epilogue, _library_why_not),
            Implementation("library_gemm", _library_gemm, _library_gemm_why_not),
            Implementation("triton", _triton, _triton_why_not),
            Implementation("hip", _hip, _hip_why_not, HIP),
        ),
        default_config={
            "block_m": 64,
            "block_n": 64,
            "block_n2": 0,
            "block_k": 32,
            "group_m": 8,
            "split_k": 1,
            "warps": 4,
            "stages": 2,
        },
        verification=VERIFICATION,
        tuning=TUNING,
    )
)


@torch.library.custom_op(
    "rocm_sd::conv2d",
    mutates_args=(),
    schema=(
        "(Tensor x, Tensor weight, Tensor? bias, Tensor? add, Tensor? residual, int stride, int padding, "
        "str? implementation=None) -> Tensor"
    ),
)
def _op(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    residual: torch.Tensor | None,
    stride: int,
    padding: int,
    implementation: str | None = None,
) -> torch.Tensor:
    out: torch.Tensor = _run(x, weight, bias, add, residual, stride, padding, implementation)
    return out


@_op.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,  # noqa: ARG001 -- the schema's arguments; the shape of y follows from the others
    add: torch.Tensor | None,  # noqa: ARG001
    residual: torch.Tensor | None,  # noqa: ARG001
    stride: int,
    padding: int,
    implementation: str | None = None,  # noqa: ARG001
) -> torch.Tensor:
    return _allocate(x, weight, stride, padding)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001 -- torch's signature
    x, weight, bias, add, residual, stride, padding = inputs[:7]
    ctx.save_for_backward(x, weight)
    ctx.bias, ctx.add, ctx.residual = (None if t is None else t.dtype for t in (bias, add, residual))
    ctx.stride, ctx.padding = stride, padding


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The library's own gradients; those of the adds are sums of the one that came in."""
    x, weight = ctx.saved_tensors
    wants_x, wants_weight, wants_bias, wants_add, wants_residual = ctx.needs_input_grad[:5]
    pair = [ctx.stride] * 2, [ctx.padding] * 2
    d_x, d_weight, _ = torch.ops.aten.convolution_backward(
        grad, _channels_last(x), _channels_last(weight.to(x.dtype)), None, *pair, [1, 1], False, [0, 0], 1,
        [wants_x, wants_weight, False],
    )  # fmt: skip
    return (
        d_x,
        d_weight.to(weight.dtype) if wants_weight else None,
        grad.sum(dim=(0, 2, 3), dtype=_wide(grad)).to(ctx.bias) if wants_bias else None,
        grad.sum(dim=(2, 3), dtype=_wide(grad)).to(ctx.add) if wants_add else None,
        grad.to(ctx.residual) if wants_residual else None,
        None,
        None,
        None,
    )


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


_op.register_autograd(_backward, setup_context=_setup_context)
