"""y = conv2d(x, weight) + bias + add + residual, channels-last: every convolution of a UNet and a VAE and its adds.

It is an implicit GEMM over channels-last maps with bias, time embedding and residual in its epilogue. Small maps divide
the depth between programs, and a second kernel adds the parts up in a fixed order.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from rocm_sd.errors import Unsupported
from rocm_sd.kernels import hip, triton
from rocm_sd.kernels.configs.conv2d import Conv2dConfig
from rocm_sd.ops.conv2d.workload import HIP, HIP_SMALLEST, TUNING, VERIFICATION, output_size, problem, variant
from rocm_sd.ops.defining import Saved, define
from rocm_sd.ops.definition import HALVES, UP_TO_FLOAT32, Implementation, where
from rocm_sd.ops.layouts import (
    as_dtype,
    channels_last,
    dense,
    is_channels_last,
    is_dense,
    joined,
    require_alike,
)
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from torch import Tensor

    from rocm_sd.kernels.hip.conv2d import Conv2dConfig as HipConfig
    from rocm_sd.ops.layouts import Part
    from rocm_sd.tuning import Problem

__all__ = ["OP", "conv2d"]

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
    concat: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = conv2d(x, weight) + bias + add + residual; x: [N, Cin, H, W] of any strides, fp16, bf16, fp32 or fp64.

    weight: [Cout, Cin, k, k], k 1 or 3, one group, no dilation; bias: [Cout]; add: [N, Cout], e.g. a time embedding;
    residual: [N, Cout, Ho, Wo]; y: like residual, in x's dtype, channels-last. x, weight and residual are copied
    where they are not channels-last. `implementation` names one and never falls back; without it the tuning data
    decides. `concat` has further input channels, which follow x's: where `OP.reads_two`, they are never joined in
    memory.
    """
    bound = OP.bound(implementation, x, weight, bias, add, residual, stride, padding, concat)
    if bound is not None:
        return bound(x, weight, bias, add, residual, stride, padding, concat)
    if concat is not None:
        require_alike(OP.name, x, concat)
        if not OP.at_once(x, weight, bias, add, residual, stride, padding, concat):
            x, concat = joined(x, concat), None
    _validate(x, weight, bias, add, residual, stride, padding, concat)
    return OP.call(x, weight, bias, add, residual, stride, padding, concat, implementation=implementation)


def _validate(
    x: Tensor, weight: Tensor, bias: Part, add: Part, residual: Part, stride: int, padding: int, concat: Part
) -> None:
    if x.dim() != 4:
        raise Unsupported(OP.name, f"x of {x.dim()} dimensions: it takes [N, Cin, H, W]")
    if weight.dim() != 4:
        raise Unsupported(OP.name, f"weight of {weight.dim()} dimensions: it takes [Cout, Cin, k, k]")
    N, Cin, H, W = x.shape
    Cin += 0 if concat is None else concat.shape[1]
    Cout, taken, height, width = weight.shape
    if taken != Cin or not Cin * Cout:
        raise Unsupported(OP.name, f"a weight for {taken} channels on x of {Cin}: groups are not taken")
    if height != width or height not in _KERNELS:
        raise Unsupported(OP.name, f"a kernel of {height}x{width}: it takes 1x1 and 3x3")
    if stride < 1 or padding < 0:
        raise Unsupported(OP.name, f"stride {stride} with padding {padding}")
    Ho, Wo = output_size(H, height, stride, padding), output_size(W, height, stride, padding)
    if Ho < 1 or Wo < 1:
        raise Unsupported(OP.name, f"a {height}x{width} kernel on {H}x{W} pixels with padding {padding}")
    OP.require_shape("bias", bias, (Cout,))
    OP.require_shape("add", add, (N, Cout))
    OP.require_shape("residual", residual, (N, Cout, Ho, Wo))


def _shape(x: Tensor, weight: Tensor, stride: int, padding: int) -> tuple[int, int, int, int]:
    N, _, H, W = x.shape
    Cout, _, kernel, _ = weight.shape
    return N, Cout, output_size(H, kernel, stride, padding), output_size(W, kernel, stride, padding)


def _empty(shape: tuple[int, int, int, int], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _allocate(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    return _empty(_shape(x, weight, stride, padding), x)


def _library(x: Tensor, weight: Tensor, bias: Part, stride: int, padding: int) -> Tensor:
    """torch's own convolution, in the layout that the op returns: some of its backends answer in another."""
    y = F.conv2d(channels_last(x), channels_last(weight.to(x.dtype)), as_dtype(bias, x.dtype), stride, padding)
    return _in_layout(y, x, weight, stride, padding)


def _in_layout(y: Tensor, x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    _, Cout, Ho, Wo = y.shape
    as_promised = y.stride() == (Cout * Ho * Wo, 1, Wo * Cout, Cout)
    return y if as_promised else _allocate(x, weight, stride, padding).copy_(y)


def _stock(
    x: Tensor, weight: Tensor, bias: Part, add: Part, residual: Part, stride: int, padding: int, concat: Part = None
) -> Tensor:
    y = _library(joined(x, concat), weight, bias, stride, padding)
    if add is not None:
        y += add[:, :, None, None].to(x.dtype)
    if residual is not None:
        y += residual.to(x.dtype)
    return y


def _library_epilogue(
    x: Tensor, weight: Tensor, bias: Part, add: Part, residual: Part, stride: int, padding: int, concat: Part = None
) -> Tensor:
    y = _library(joined(x, concat), weight, None, stride, padding)
    _finish(y, bias, add, residual)
    return y


def _bind_library_epilogue(
    x: Tensor, weight: Tensor, bias: Part, add: Part, residual: Part, stride: int, padding: int, concat: Part = None
) -> Callable[..., Tensor] | None:
    if concat is not None or not _lie_as_read(x, weight, bias, add, residual):
        return None
    if bias is None and add is None and residual is None:
        return None
    shape = _shape(x, weight, stride, padding)
    finishing = triton.bind_op("conv2d", shape, bias, add, residual, bind="bind_finish")
    if finishing is None:
        return None

    def bound(
        x: Tensor, weight: Tensor, bias: Part, add: Part, residual: Part, stride: int, padding: int, _concat: None
    ) -> Tensor:
        y = _in_layout(F.conv2d(x, weight, None, stride, padding), x, weight, stride, padding)
        finishing(y, y, bias, add, residual)
        return y

    return bound


def _lie_as_read(x: Tensor, weight: Tensor, bias: Part, add: Part, residual: Part, concat: Part = None) -> bool:
    """Whether kernels in Triton read all of them where they lie, and have something to do."""
    in_place = is_channels_last(x, weight, residual, concat) and is_dense(bias, add)
    return in_place and weight.dtype == x.dtype and bool(x.numel())


def _library_gemm(
    x: Tensor, weight: Tensor, bias: Part, add: Part, residual: Part, stride: int, padding: int, concat: Part = None
) -> Tensor:
    x = joined(x, concat)
    out = _allocate(x, weight, stride, padding)
    N, Cin, H, W = x.shape
    rows = channels_last(x).permute(0, 2, 3, 1).reshape(N * H * W, Cin)
    target = out.permute(0, 2, 3, 1).view(N * H * W, out.shape[1])
    filters = weight.to(x.dtype).reshape(-1, Cin).t()
    if bias is not None and add is None and residual is None:
        # The one epilogue that the libraries have themselves.
        torch.addmm(bias.to(x.dtype), rows, filters, out=target)
        return out
    torch.mm(rows, filters, out=target)
    _finish(out, bias, add, residual)
    return out


def _finish(y: Tensor, bias: Part, add: Part, residual: Part) -> None:
    from rocm_sd.kernels.triton.conv2d import finish  # noqa: PLC0415 -- needs Triton

    if y.numel() and not (bias is None and add is None and residual is None):
        finish(y, y, dense(bias), dense(add), None if residual is None else channels_last(residual))


def _by_kernel(
    language: ModuleType,
    x: Tensor,
    weight: Tensor,
    bias: Part,
    add: Part,
    residual: Part,
    stride: int,
    padding: int,
    concat: Part = None,
    *,
    config: Conv2dConfig | HipConfig,
) -> Tensor:
    more: tuple[Tensor, ...] = ()
    if concat is not None and isinstance(config, Conv2dConfig) and config.reads_two(weight.shape[2]):
        more = (channels_last(concat),)
    else:
        x = joined(x, concat)
    out = _allocate(x, weight, stride, padding)
    if out.numel():
        # Kernels in HIP take all in one dtype.
        dtype = x.dtype if language is hip else None
        residual = residual if residual is None else channels_last(residual.to(dtype or residual.dtype))
        parts = dense(bias, dtype), dense(add, dtype), residual
        given = (channels_last(x), channels_last(weight.to(x.dtype)), out, *parts, stride, padding, config, *more)
        language.launch_op("conv2d", x.device, *given)
    return out


def _bind(
    x: Tensor,
    weight: Tensor,
    bias: Part,
    add: Part,
    residual: Part,
    stride: int,
    padding: int,
    concat: Part = None,
    *,
    config: Conv2dConfig,
) -> Callable[..., Tensor] | None:
    joins = concat is not None and not config.reads_two(weight.shape[2])
    if joins or not _lie_as_read(x, weight, bias, add, residual, concat):
        return None
    shape = _shape(x, weight, stride, padding)
    launch = triton.bind_op("conv2d", x, weight, shape, bias, add, residual, stride, padding, config, concat)
    if launch is None:
        return None

    def bound(
        x: Tensor, weight: Tensor, bias: Part, add: Part, residual: Part, _stride: int, _padding: int, concat: Part
    ) -> Tensor:
        out = _empty(shape, x)
        launch(x, weight, out, bias, add, residual, concat)
        return out

    return bound


def _not_a_gemm(problem: Problem) -> str | None:
    if (problem["kernel"], problem["stride"], problem["padding"]) != (1, 1, 0):
        return "anything but a 1x1 kernel with stride 1 and no padding"
    return None


def _reads_two(problem: Problem, config: Conv2dConfig) -> bool:
    return config.reads_two(int(problem["kernel"]))


def _parts_bytes(arguments: tuple[Any, ...], config: Conv2dConfig | HipConfig, _device: torch.device) -> int:
    """The sums of the parts into which `split_k` cuts the depth, in float32."""
    asked = problem(*arguments)
    return 4 * config.split_k * int(asked["pixels"]) * int(asked["cout"]) if config.split_k > 1 else 0


def _backward(saved: Saved, grad: Tensor) -> Mapping[str, Part]:
    """The library's own gradients; those of the adds are sums of the one that came in."""
    x, weight, wanted = saved.x, saved.weight, saved.wanted
    pair = [saved.stride] * 2, [saved.padding] * 2
    d_x, d_weight, _ = torch.ops.aten.convolution_backward(
        grad, channels_last(x), channels_last(weight.to(x.dtype)), None, *pair, [1, 1], False, [0, 0], 1,
        ["x" in wanted, "weight" in wanted, False],
    )  # fmt: skip
    wide = torch.promote_types(grad.dtype, torch.float32)
    return {
        "x": d_x,
        "weight": d_weight,
        "bias": grad.sum(dim=(0, 2, 3), dtype=wide) if "bias" in wanted else None,
        "add": grad.sum(dim=(2, 3), dtype=wide) if "add" in wanted else None,
        "residual": grad if "residual" in wanted else None,
    }


OP = define(
    conv2d,
    summary="3x3 and 1x1 convolution with bias, time embedding and residual added in the same pass, channels-last",
    family="convolution",
    implementations=(
        Implementation(STOCK, _stock),
        Implementation(
            "library_epilogue", _library_epilogue, where(triton, UP_TO_FLOAT32), bind=_bind_library_epilogue
        ),
        Implementation("library_gemm", _library_gemm, where(triton, UP_TO_FLOAT32, _not_a_gemm)),
        Implementation(
            "triton",
            partial(_by_kernel, triton),
            where(triton, HALVES),
            default=Conv2dConfig(),
            fuses_adds=True,
            reads_two=_reads_two,
            scratch_bytes=_parts_bytes,
            variant=variant,
            bind=_bind,
        ),
        Implementation(
            "hip",
            partial(_by_kernel, hip),
            where(hip, HALVES),
            HIP,
            default=HIP_SMALLEST,
            fuses_adds=True,
            scratch_bytes=_parts_bytes,
            variant=variant,
        ),
    ),
    allocate=_allocate,
    backward=_backward,
    saves=("x", "weight"),
    eager_only=("concat",),
    verification=VERIFICATION,
    tuning=TUNING,
)
