"""The calls that count: what layout_copy is proven on, tuned for and timed at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.kernels.configs.layout_copy import LayoutCopyConfig
from rocm_sd.ops.definition import Bucket, KernelPromise, Kernels, Tuning, Verification, Work
from rocm_sd.ops.layout_copy import reference
from rocm_sd.ops.samples import Draw, Sample, dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rocm_sd.arch import Arch
    from rocm_sd.tuning import Problem

__all__ = ["HIP", "TUNING", "VERIFICATION", "problem"]


def problem(x: torch.Tensor, channels_last: bool) -> Problem:
    N, C, H, W = x.shape
    return {"n": N, "c": C, "hw": H * W, "channels_last": int(channels_last), "dtype": dtype_name(x.dtype)}


def _sample(shape: tuple[int, int, int, int], channels_last: bool, dtype: torch.dtype = torch.float16) -> Sample:
    """A copy that changes the layout: x stands in the other one."""

    def build(draw: Draw) -> tuple[Any, ...]:
        return draw(*shape) if channels_last else draw.image(*shape), channels_last

    size = "x".join(map(str, shape))
    return Sample(f"{size} to {'channels-last' if channels_last else 'contiguous'}, {dtype_name(dtype)}", dtype, build)


def _both(*shape: int) -> tuple[Sample, Sample]:
    N, C, H, W = shape
    return _sample((N, C, H, W), True), _sample((N, C, H, W), False)


def _space(problem: Problem, arch: Arch) -> Iterator[LayoutCopyConfig]:
    wave = arch.wave_size or 32
    if int(problem["c"]) <= 8:
        # Latents and pictures: too little for tiles as big as a feature map's.
        for block_hw in (64, 128, 256):
            for warps in (1, 2, 4):
                if 4 <= 8 * block_hw // (warps * wave) <= 16:
                    yield LayoutCopyConfig(8, block_hw, warps)
        return
    size = 4 if problem["dtype"] == "float32" else 2
    line = 128 // size
    # A row of a tile is a cache line of 128 bytes or two of them, on both sides.
    for block_c, block_hw in ((line, line), (line, 2 * line), (2 * line, line), (2 * line, 2 * line)):
        for warps in (2, 4, 8):
            values = block_c * block_hw // (warps * wave)
            # One 16-byte access a thread at least; 4 KiB of LDS a wave leave half the waves in place everywhere.
            if values * size >= 16 and values * size * wave <= 4096:
                yield LayoutCopyConfig(block_c, block_hw, warps)


def _work(x: torch.Tensor, channels_last: bool) -> Work:  # noqa: ARG001 -- the op's own arguments
    return Work(0.0, 2.0 * x.numel() * x.element_size())


VERIFICATION = Verification(
    implementation="triton",
    kernels="rocm_sd.kernels.triton.layout_copy",
    reference=reference.layout_copy,
    problem=problem,
    small=(
        _sample((2, 48, 8, 8), True),
        _sample((1, 70, 9, 11), False),
        _sample((1, 4, 16, 16), False),
        _sample((2, 3, 13, 7), True, torch.bfloat16),
        _sample((1, 33, 5, 4), True, torch.float32),
        _sample((1, 40, 6, 6), False, torch.float32),
    ),
    real=(*_both(2, 320, 64, 64), *_both(2, 1280, 16, 16), *_both(1, 128, 512, 512)),
    tiny=(_sample((2, 3, 2, 4), True, torch.float64), _sample((2, 3, 2, 4), False, torch.float64)),
    empty=(_sample((0, 32, 4, 4), True), _sample((0, 32, 4, 4), False)),
    promises={"_transpose": KernelPromise(bound_by_memory=True)},
)

_MEMORY = KernelPromise(bound_by_memory=True)
HIP = Kernels(
    module="rocm_sd.kernels.hip.layout_copy",
    promises={
        "layout_copy_wide": _MEMORY,
        "layout_copy_few": _MEMORY,
        "layout_copy_plain": KernelPromise(narrow_loads_because="it is for what no wide access fits"),
    },
    # Latents and pictures.
    real=(*_both(2, 4, 64, 64), *_both(1, 3, 512, 512)),
)

TUNING = Tuning(
    space=_space,
    buckets=(
        Bucket({"c": [1, 8], "channels_last": 1}, _sample((2, 4, 64, 64), True)),
        Bucket({"c": [1, 8], "channels_last": 0}, _sample((1, 3, 512, 512), False)),
        Bucket({"dtype": "float32"}, _sample((2, 320, 64, 64), True, torch.float32)),
        Bucket({"hw": [1, 4096], "channels_last": 1}, _sample((2, 320, 64, 64), True)),
        Bucket({"hw": [1, 4096], "channels_last": 0}, _sample((2, 320, 64, 64), False)),
        Bucket({"hw": [4097, 2**31], "channels_last": 1}, _sample((1, 128, 512, 512), True)),
        Bucket({"hw": [4097, 2**31], "channels_last": 0}, _sample((1, 128, 512, 512), False)),
    ),
    work=_work,
    # It moves as many bytes as torch's copy does: nothing is saved until a card is timed.
    untimed="torch",
    timed=(*_both(2, 1280, 16, 16), _sample((2, 4, 64, 64), False), _sample((1, 3, 512, 512), True)),
)
