"""The calls that count: what layer_norm_residual is proven on, tuned for and timed at."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.kernels.configs.layer_norm_residual import LayerNormResidualConfig
from rocm_sd.kernels.hip.layer_norm_residual import LayerNormResidualConfig as HipConfig
from rocm_sd.ops.definition import Bucket, KernelPromise, Kernels, Tuning, Verification, Work
from rocm_sd.ops.eight_bits import LIMITS, fits, rounded_to
from rocm_sd.ops.layer_norm_residual import reference
from rocm_sd.ops.samples import Draw, Sample, dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rocm_sd.arch import Arch
    from rocm_sd.tuning import Problem

__all__ = ["HIP", "TUNING", "VERIFICATION", "problem"]


def problem(x: torch.Tensor, residual: torch.Tensor | None = None, *rest: Any) -> Problem:
    C, to = x.shape[-1], rest[4] if len(rest) > 4 else None
    sizes: Problem = {"m": x.numel() // C, "c": C, "residual": int(residual is not None)}
    return {**sizes, "dtype": dtype_name(x.dtype), **rounded_to(to)}


def _sample(
    rows: int,
    C: int,
    dtype: torch.dtype,
    *,
    affine: bool = True,
    residual: bool = True,
    to: str | None = None,
    mean: float = 0.7,
    std: float = 2.0,
) -> Sample:
    def build(draw: Draw) -> tuple[Any, ...]:
        x = draw(rows, C, mean=mean, std=std)
        added = draw(rows, C, std=std / 2) if residual else None
        given = x, added, *((draw(C, mean=1.0, std=0.3), draw(C)) if affine else (None, None)), 1e-5
        # So that some values are beyond the limit.
        return given if to is None else (*given, draw(1, mean=2.0 / LIMITS[to], std=0.0, dtype=torch.float32), to)

    parts = ("" if affine else ", bare") + ("" if residual else ", no residual") + ("" if to is None else f", to {to}")
    parts += "" if std == 2.0 else f", {mean:g} +- {std:g}"
    return Sample(f"{rows}x{C}, {dtype_name(dtype)}{parts}", dtype, build)


def _real(rows: int, C: int, *, residual: bool = True, to: str | None = None) -> Sample:
    return _sample(rows, C, torch.float16, residual=residual, to=to)


def _space(problem: Problem, arch: Arch) -> Iterator[LayerNormResidualConfig]:
    """One 16-byte load a lane for each chunk: chunks that divide the row, or its half or its whole with idle lanes."""
    wave = arch.wave_size or 32
    m, c = int(problem["m"]), int(problem["c"])
    whole = 1 << (c - 1).bit_length()
    chunks = {whole, whole // 2}
    divisor = c & -c
    # Five chunks of 8 values in waves of 64 leave 3 waves of 8 on gfx942; in waves of 32 they leave all 16 on gfx1100.
    if wave == 32 and c <= 7 * divisor:
        chunks.add(divisor)
    for chunk, warps in product(sorted(chunks), (1, 2, 4, 8)):
        rows = 8 * warps * wave // chunk
        # A few hundred rows in eights would leave most of the compute units idle.
        if rows >= 1 and rows * 64 <= m:
            yield LayerNormResidualConfig(rows, warps, chunk)


def _work(x: torch.Tensor, residual: torch.Tensor | None = None, *_rest: Any) -> Work:
    # Ten operations an element; two tensors read and two written, or one of each.
    return Work(10.0 * x.numel(), (2.0 if residual is None else 4.0) * x.numel() * x.element_size())


VERIFICATION = Verification(
    implementation="triton",
    kernels="rocm_sd.kernels.triton.layer_norm_residual",
    reference=reference.layer_norm_residual,
    problem=problem,
    small=(
        _sample(9, 320, torch.float16),
        _sample(5, 77, torch.bfloat16),
        _sample(3, 640, torch.float32, affine=False),
        _sample(1, 1, torch.float16),
        _sample(6, 320, torch.float16, residual=False),
        _sample(3, 45, torch.bfloat16, affine=False, residual=False),
        *(_sample(3, 77, dtype, affine=False, mean=7.3, std=0.0) for dtype in (torch.float16, torch.float32)),
        _sample(3, 320, torch.float32, affine=False, residual=False, mean=7.3, std=1e-3),
        _sample(6, 96, torch.float16, to="int8"),
        _sample(5, 320, torch.float16, to="float8_e4m3fn"),
        _sample(3, 77, torch.bfloat16, residual=False, to="float8_e4m3fnuz"),
    ),
    # The transformer blocks of Stable Diffusion 1.5 and SDXL, and the widths of text encoders.
    real=(
        _real(8192, 320),
        _real(2048, 640),
        _real(512, 1280),
        _real(2048, 1280),
        _real(154, 768),
        _real(154, 2048),
        _real(8192, 320, residual=False),
        *(_real(2048, 1280, to=to) for to in LIMITS),
    ),
    tiny=(
        _sample(6, 6, torch.float64),
        _sample(6, 6, torch.float64, affine=False),
        _sample(3, 8, torch.float64, residual=False),
    ),
    empty=(_sample(0, 32, torch.float16), _sample(0, 32, torch.float16, residual=False)),
    promises={"_layer_norm_residual": KernelPromise(bound_by_memory=True)},
    fits=fits,
)


def _hip_space(_problem: Problem, _arch: Arch) -> Iterator[HipConfig]:
    for threads in (64, 128, 256, 512):
        yield HipConfig(threads)


HIP = Kernels(
    module="rocm_sd.kernels.hip.layer_norm_residual",
    promises={"layer_norm_residual": KernelPromise(bound_by_memory=True)},
    space=_hip_space,
)

TUNING = Tuning(
    space=_space,
    buckets=(
        Bucket({"c": [1, 448]}, _real(8192, 320)),
        Bucket({"c": [449, 896]}, _real(8192, 640)),
        Bucket({"c": [897, 1536], "m": [1, 1024]}, _real(512, 1280)),
        Bucket({"c": [897, 1536], "m": [1025, 2**31]}, _real(2048, 1280)),
        Bucket({"c": [1537, 16384]}, _real(2048, 2048)),
    ),
    work=_work,
    untimed="triton",
    # Blocks of SD 1.5 at 512x512 and of SDXL at 1024x1024; 2 maps are one picture with guidance, 16 are eight. The
    # first norm of a transformer has no residual.
    timed=(
        *(
            _real(maps * tokens, C, residual=residual)
            for maps in (2, 16)
            for tokens, C in ((4096, 320), (4096, 640), (1024, 640), (1024, 1280), (256, 1280), (64, 1280))
            for residual in (False, True)
        ),
        _real(8 * 4096, 640),
        _real(8 * 4096, 320),
        _real(8 * 1024, 1280),
    ),
)
