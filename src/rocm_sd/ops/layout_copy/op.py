"""y = x in memory of its own, channels-last or contiguous: between a model in one layout and a caller in the other.

It copies between layouts with coalesced reads and writes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from rocm_sd.errors import Unsupported
from rocm_sd.kernels import hip, triton
from rocm_sd.kernels.configs.layout_copy import LayoutCopyConfig
from rocm_sd.ops.defining import Saved, define
from rocm_sd.ops.definition import UP_TO_FLOAT32, Implementation, where
from rocm_sd.ops.layout_copy.workload import HIP, TUNING, VERIFICATION
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from torch import Tensor

    from rocm_sd.ops.layouts import Part
    from rocm_sd.tuning import Problem

__all__ = ["OP", "layout_copy"]


def layout_copy(x: torch.Tensor, channels_last: bool, implementation: str | None = None) -> torch.Tensor:
    """y = x; x: [N, C, H, W] of any strides, fp16, bf16, fp32 or fp64; y: channels-last, or contiguous [N, C, H, W].

    y never shares x's memory. The kernel transposes between the two layouts; what is in the wanted layout already, or
    in neither, is copied by torch. `implementation` names one and never falls back; without it the tuning data decides.
    """
    if x.dim() != 4:
        raise Unsupported(OP.name, f"x of {x.dim()} dimensions: it takes [N, C, H, W]")
    return OP.call(x, channels_last, implementation=implementation)


def _allocate(x: Tensor, channels_last: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def _stock(x: Tensor, channels_last: bool) -> Tensor:
    return _allocate(x, channels_last).copy_(x)


def _by_kernel(
    language: ModuleType, x: Tensor, channels_last: bool, *, config: LayoutCopyConfig | None = None
) -> Tensor:
    out = _allocate(x, channels_last)
    if not _is_transpose(x, channels_last):
        return out.copy_(x)
    if x.numel():
        language.launch_op("layout_copy", x.device, x, out, channels_last, *(() if config is None else (config,)))
    return out


def _is_transpose(x: Tensor, channels_last: bool) -> bool:
    as_channels_last, as_contiguous = x.is_contiguous(memory_format=torch.channels_last), x.is_contiguous()
    # Both where there is one channel or one pixel: then nothing moves.
    return as_channels_last != as_contiguous and not (as_channels_last if channels_last else as_contiguous)


def _too_large(problem: Problem) -> str | None:
    if min(int(problem["c"]), 128) * int(problem["hw"]) >= 2**31:
        return f"{problem['hw']} pixels: a tile's offsets pass 32 bits"
    return None


def _backward(_saved: Saved, grad: Tensor) -> Mapping[str, Part]:
    return {"x": grad}


OP = define(
    layout_copy,
    summary="copies between contiguous and channels-last, coalesced on both sides",
    family="layout copies",
    implementations=(
        Implementation(STOCK, _stock),
        Implementation(
            "triton", partial(_by_kernel, triton), where(triton, UP_TO_FLOAT32, _too_large), default=LayoutCopyConfig()
        ),
        Implementation("hip", partial(_by_kernel, hip), where(hip, UP_TO_FLOAT32, _too_large), HIP),
    ),
    allocate=_allocate,
    backward=_backward,
    saves=(),
    verification=VERIFICATION,
    tuning=TUNING,
)
