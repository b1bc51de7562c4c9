"""The calls that count: what upsample is proven on, tuned for and timed at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.kernels.configs.upsample import UpsampleConfig
from rocm_sd.ops.definition import Bucket, KernelPromise, Kernels, Tuning, Verification, Work
from rocm_sd.ops.samples import Draw, Sample, dtype_name
from rocm_sd.ops.upsample import reference

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rocm_sd.arch import Arch
    from rocm_sd.tuning import Problem

__all__ = ["HIP", "TUNING", "VERIFICATION", "problem"]


def problem(x: torch.Tensor, scale: int, mode: str) -> Problem:
    N, C, H, W = x.shape
    return {"n": N, "c": C, "hw": H * W, "scale": scale, "mode": mode, "dtype": dtype_name(x.dtype)}


def _sample(shape: tuple[int, int, int, int], mode: str, scale: int = 2, dtype: torch.dtype = torch.float16) -> Sample:
    def build(draw: Draw) -> tuple[Any, ...]:
        return draw.image(*shape), scale, mode

    size = "x".join(map(str, shape))
    return Sample(f"{size}, {mode} {scale}x, {dtype_name(dtype)}", dtype, build)


def _space(problem: Problem, arch: Arch) -> Iterator[UpsampleConfig]:
    wave = arch.wave_size or 32
    for rows, block_c in ((8, 128), (16, 64), (32, 64), (16, 128), (32, 128)):
        for warps in (2, 4, 8):
            values = rows * block_c // (warps * wave)
            # One or two 16-byte accesses a thread; bilinear holds three columns in float32 at a time, so one.
            if values in ((8, 16) if problem["mode"] == "nearest" else (4, 8)):
                yield UpsampleConfig(rows, block_c, warps)


def _work(x: torch.Tensor, scale: int, mode: str) -> Work:
    pixels = x.numel() * scale * scale
    return Work(0.0 if mode == "nearest" else 6.0 * pixels, float((x.numel() + pixels) * x.element_size()))


_SHAPES: tuple[tuple[int, int, int, int], ...] = ((2, 1280, 16, 16), (1, 512, 128, 128), (1, 256, 256, 256))

VERIFICATION = Verification(
    implementation="triton",
    kernels="rocm_sd.kernels.triton.upsample",
    reference=reference.upsample,
    problem=problem,
    small=(
        _sample((2, 24, 4, 5), "nearest"),
        _sample((1, 30, 3, 7), "nearest", 3, torch.bfloat16),
        _sample((1, 24, 5, 4), "bilinear"),
        _sample((1, 9, 3, 5), "bilinear", 3, torch.float32),
        _sample((1, 16, 1, 1), "bilinear", 2, torch.bfloat16),
    ),
    real=tuple(_sample(shape, mode) for shape in _SHAPES for mode in ("nearest", "bilinear")),
    tiny=tuple(
        _sample((2, 3, 2, 4), mode, scale, torch.float64) for mode in ("nearest", "bilinear") for scale in (1, 2, 3)
    ),
    empty=(_sample((0, 8, 4, 4), "nearest"), _sample((0, 8, 4, 4), "bilinear")),
    promises={"_nearest": KernelPromise(bound_by_memory=True), "_bilinear": KernelPromise(bound_by_memory=True)},
)

HIP = Kernels(module="rocm_sd.kernels.hip.upsample", promises={"upsample": KernelPromise(bound_by_memory=True)})

TUNING = Tuning(
    space=_space,
    buckets=tuple(
        Bucket({"mode": mode, "hw": hw}, _sample(shape, mode))
        for mode in ("nearest", "bilinear")
        for hw, shape in (([1, 4096], _SHAPES[0]), ([4097, 2**31], _SHAPES[2]))
    ),
    work=_work,
    # It moves as many bytes as torch's own kernel for channels-last does: nothing is saved until a card is timed.
    untimed="torch",
    timed=tuple(
        _sample(shape, mode)
        for shape in (_SHAPES[1], (2, 1280, 8, 8), (2, 640, 32, 32), (2, 640, 64, 64))
        for mode in ("nearest", "bilinear")
    ),
)
