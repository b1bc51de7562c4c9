"""y = x in memory of its own, channels-last or contiguous: between a model in one layout and a caller in the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.errors import Unsupported
from rocm_sd.kernels import hip as hip_kernels
from rocm_sd.kernels import triton as triton_kernels
from rocm_sd.ops.layout_copy.workload import HIP, TUNING, VERIFICATION, problem
from rocm_sd.ops.registry import Implementation, Op, needs_no_dispatcher, register
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.tuning import Problem

__all__ = ["OP", "layout_copy"]


def layout_copy(x: torch.Tensor, channels_last: bool, implementation: str | None = None) -> torch.Tensor:
    """y = x; x: [N, C, H, W] of any strides, fp16, bf16, fp32 or fp64; y: channels-last, or contiguous [N, C, H, W].

    y never shares x's memory. The kernel transposes between the two layouts; what is in the wanted layout already, or
    in neither, is copied by torch. `implementation` names one and never falls back; without it the tuning data decides.
    """
    if x.dim() != 4:
        raise Unsupported(OP.name, f"x of {x.dim()} dimensions: it takes [N, C, H, W]")
    if x.dtype not in {torch.float16, torch.bfloat16, torch.float32, torch.float64}:
        raise Unsupported(OP.name, f"dtype {x.dtype}", hint="Use float16, bfloat16, float32 or float64.")
    if needs_no_dispatcher(x):
        out: torch.Tensor = OP.run(problem(x, channels_last), x.device, implementation, x, channels_last)
        return out
    y: torch.Tensor = torch.ops.rocm_sd.layout_copy(x, channels_last, implementation)
    return y


def _allocate(x: torch.Tensor, channels_last: bool) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def _stock(x: torch.Tensor, channels_last: bool, *, config: Mapping[str, int]) -> torch.Tensor:  # noqa: ARG001
    return _allocate(x, channels_last).copy_(x)


def _triton(x: torch.Tensor, channels_last: bool, *, config: Mapping[str, int]) -> torch.Tensor:
    from rocm_sd.kernels.triton.layout_copy import LayoutCopyConfig, launch  # noqa: PLC0415 -- needs Triton

    out = _allocate(x, channels_last)
    if not _is_transpose(x, channels_last):
        return out.copy_(x)
    if x.numel():
        launch(x, out, channels_last, LayoutCopyConfig.from_mapping(config))
    return out


def _is_transpose(x: torch.Tensor, channels_last: bool) -> bool:
    as_channels_last, as_contiguous = x.is_contiguous(memory_format=torch.channels_last), x.is_contiguous()
    # Both where there is one channel or one pixel: then nothing moves.
    return as_channels_last != as_contiguous and not (as_channels_last if channels_last else as_contiguous)


def _triton_why_not(problem: Problem, device: torch.device) -> str | None:
    if problem["dtype"] == "float64":
        return "dtype float64"
    if min(int(problem["c"]), 128) * int(problem["hw"]) >= 2**31:
        return f"{problem['hw']} pixels: a tile's offsets pass 32 bits"
    return triton_kernels.why_not(device)


def _hip(x: torch.Tensor, channels_last: bool, *, config: Mapping[str, int]) -> torch.Tensor:  # noqa: ARG001
    from rocm_sd.kernels.hip.layout_copy import launch  # noqa: PLC0415 -- only where it is used

    out = _allocate(x, channels_last)
    if not _is_transpose(x, channels_last):
        return out.copy_(x)
    if x.numel():
        launch(x, out, channels_last, hip_kernels.launcher_for(x.device))
    return out


def _hip_why_not(problem: Problem, device: torch.device) -> str | None:
    if problem["dtype"] == "float64":
        return "dtype float64"
    if min(int(problem["c"]), 128) * int(problem["hw"]) >= 2**31:
        return f"{problem['hw']} pixels: a tile's offsets pass 32 bits"
    return hip_kernels.why_not(device)


OP = register(
    Op(
        name="layout_copy",
        summary="copies between contiguous and channels-last, coalesced on both sides",
        implementations=(
            Implementation(STOCK, _stock, lambda _problem, _device: None),
            Implementation("triton", _triton, _triton_why_not),
            Implementation("hip", _hip, _hip_why_not, HIP),
        ),
        default_config={"block_c": 64, "block_hw": 64, "warps": 4},
        verification=VERIFICATION,
        tuning=TUNING,
    )
)


@torch.library.custom_op(
    "rocm_sd::layout_copy",
    mutates_args=(),
    schema="(Tensor x, bool channels_last, str? implementation=None) -> Tensor",
)
def _op(x: torch.Tensor, channels_last: bool, implementation: str | None = None) -> torch.Tensor:
    out: torch.Tensor = OP.run(problem(x, channels_last), x.device, implementation, x, channels_last)
    return out


@_op.register_fake
def _(x: torch.Tensor, channels_last: bool, *_arguments: Any, **_named: Any) -> torch.Tensor:
    return _allocate(x, channels_last)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    pass  # the gradient needs nothing of the forward pass


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ARG001 -- torch's signature
    return grad, None, None


_op.register_autograd(_backward, setup_context=_setup_context)
