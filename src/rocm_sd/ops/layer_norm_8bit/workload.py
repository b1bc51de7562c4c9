"""The calls that count: what layer_norm_8bit is proven on, tuned for and timed at."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.kernels.configs.layer_norm_8bit import LayerNorm8bitConfig
from rocm_sd.ops.definition import Bucket, KernelPromise, Tuning, Verification, Work
from rocm_sd.ops.eight_bits import LIMITS, fits
from rocm_sd.ops.layer_norm_8bit import reference
from rocm_sd.ops.samples import Draw, Sample, dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rocm_sd.arch import Arch
    from rocm_sd.tuning import Problem

__all__ = ["TUNING", "VERIFICATION", "problem"]


def problem(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None = None,  # noqa: ARG001 -- the op's own arguments
    bias: torch.Tensor | None = None,  # noqa: ARG001
    eps: float = 1e-5,  # noqa: ARG001
    to: str = "int8",
) -> Problem:
    C = x.shape[-1]
    return {
        "m": x.numel() // C,
        "c": C,
        "residual": int(residual is not None),
        "to": to,
        "dtype": dtype_name(x.dtype),
    }


def _sample(
    rows: int,
    C: int,
    dtype: torch.dtype = torch.float16,
    to: str = "int8",
    *,
    affine: bool = True,
    residual: bool = True,
    mean: float = 0.7,
    std: float = 2.0,
) -> Sample:
    def build(draw: Draw) -> tuple[Any, ...]:
        x = draw(rows, C, mean=mean, std=std)
        added = draw(rows, C, std=std / 2) if residual else None
        return x, added, *((draw(C, mean=1.0, std=0.3), draw(C)) if affine else (None, None)), 1e-5, to

    parts = ("" if affine else ", bare") + ("" if residual else ", no residual")
    parts += "" if std == 2.0 else f", {mean:g} +- {std:g}"
    return Sample(f"{rows}x{C} to {to}, {dtype_name(dtype)}{parts}", dtype, build)


def _space(problem: Problem, arch: Arch) -> Iterator[LayerNorm8bitConfig]:
    """One 16-byte load a lane for each chunk: chunks that divide the row, or its half or its whole with idle lanes."""
    wave = arch.wave_size or 32
    m, c = int(problem["m"]), int(problem["c"])
    whole = 1 << (c - 1).bit_length()
    chunks = {whole, whole // 2}
    divisor = c & -c
    # As for `layer_norm_residual`: five chunks of 8 values in waves of 64 leave 3 waves of 8 on gfx942.
    if wave == 32 and c <= 7 * divisor:
        chunks.add(divisor)
    for chunk, warps in product(sorted(chunks), (1, 2, 4, 8)):
        rows = 8 * warps * wave // chunk
        # A few hundred rows in eights would leave most of the compute units idle.
        if rows >= 1 and rows * 64 <= m:
            yield LayerNorm8bitConfig(rows, warps, chunk)


def _work(x: torch.Tensor, residual: torch.Tensor | None, *_rest: Any) -> Work:
    # Twelve operations an element; two tensors read and one written, or one read, and one written in 8 bits.
    wide = 1.0 if residual is None else 3.0
    return Work(12.0 * x.numel(), x.numel() * (wide * x.element_size() + 1.0))


VERIFICATION = Verification(
    implementation="triton",
    kernels="rocm_sd.kernels.triton.layer_norm_8bit",
    reference=reference.layer_norm_8bit,
    problem=problem,
    small=(
        _sample(9, 320),
        _sample(5, 77, torch.bfloat16),
        _sample(6, 320, residual=False),
        _sample(3, 45, torch.bfloat16, affine=False, residual=False),
        _sample(1, 1, affine=False),
        _sample(3, 77, affine=False, residual=False, mean=7.3, std=0.0),
        _sample(5, 96, torch.float16, "float8_e4m3fn"),
        _sample(3, 77, torch.bfloat16, "float8_e4m3fnuz", residual=False),
    ),
    # The transformer blocks of Stable Diffusion 1.5 and SDXL.
    real=(
        _sample(8192, 320),
        _sample(8192, 640),
        _sample(512, 1280),
        _sample(2048, 1280),
        _sample(2048, 2048),
        _sample(8192, 640, residual=False),
        *(_sample(2048, 1280, to=to) for to in LIMITS if to != "int8"),
    ),
    tiny=(_sample(6, 6, torch.float64), _sample(6, 6, torch.float64, affine=False, residual=False)),
    empty=(_sample(0, 32), _sample(0, 32, residual=False)),
    promises={"_layer_norm_8bit": KernelPromise(bound_by_memory=True)},
    fits=fits,
)

TUNING = Tuning(
    space=_space,
    buckets=(
        Bucket({"c": [1, 448]}, _sample(8192, 320)),
        Bucket({"c": [449, 896]}, _sample(8192, 640)),
        Bucket({"c": [897, 1536], "m": [1, 1024]}, _sample(512, 1280)),
        Bucket({"c": [897, 1536], "m": [1025, 2**31]}, _sample(2048, 1280)),
        Bucket({"c": [1537, 16384]}, _sample(2048, 2048)),
    ),
    work=_work,
    untimed="triton",
    # Blocks of SD 1.5 at 512x512 and of SDXL at 1024x1024. The first norm of a transformer has no residual.
    timed=tuple(
        _sample(2 * tokens, C, residual=residual)
        for tokens, C in ((4096, 320), (4096, 640), (1024, 640), (1024, 1280))
        for residual in (False, True)
    ),
)
