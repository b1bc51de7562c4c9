"""The calls that count: what geglu_8bit is proven on, tuned for and timed at."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.kernels.configs.geglu_8bit import Geglu8bitConfig
from rocm_sd.ops.definition import Bucket, KernelPromise, Tuning, Verification, Work
from rocm_sd.ops.eight_bits import LIMITS, fits
from rocm_sd.ops.geglu_8bit import reference
from rocm_sd.ops.samples import Draw, Sample, dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rocm_sd.arch import Arch
    from rocm_sd.tuning import Problem

__all__ = ["TUNING", "VERIFICATION", "problem"]


def problem(x: torch.Tensor, to: str = "int8") -> Problem:
    F = x.shape[-1] // 2
    return {"m": x.numel() // (2 * F), "f": F, "to": to, "dtype": dtype_name(x.dtype)}


def _sample(rows: int, F: int, dtype: torch.dtype = torch.float16, to: str = "int8") -> Sample:
    def build(draw: Draw) -> tuple[Any, ...]:
        return draw(rows, 2 * F, std=2.0), to

    return Sample(f"{rows}x{F} to {to}, {dtype_name(dtype)}", dtype, build)


def _space(problem: Problem, arch: Arch) -> Iterator[Geglu8bitConfig]:
    """8 or 16 results a lane of each chunk, at most 32 in all: beside the gates they stay within 256 registers."""
    wave, f = arch.wave_size or 32, int(problem["f"])
    whole = 1 << (f - 1).bit_length()
    divisor = f & -f
    chunks = {whole, whole // 2} | ({divisor} if f <= 7 * divisor else set())
    for chunk, warps, rows in product(sorted(chunks), (2, 4, 8, 16), (1, 2)):
        lanes = warps * wave
        if 8 * lanes <= rows * chunk and rows * -(-f // chunk) * chunk <= 32 * lanes:
            yield Geglu8bitConfig(rows, warps, chunk)


def _work(x: torch.Tensor, *_rest: Any) -> Work:
    # 22 operations a result; two values read for each, and one of 8 bits written.
    return Work(11.0 * x.numel(), x.numel() * (x.element_size() + 0.5))


VERIFICATION = Verification(
    implementation="triton",
    kernels="rocm_sd.kernels.triton.geglu_8bit",
    reference=reference.geglu_8bit,
    problem=problem,
    small=(
        _sample(5, 320),
        _sample(3, 77, torch.bfloat16),
        _sample(1, 1),
        _sample(4, 96, torch.float16, "float8_e4m3fn"),
        _sample(3, 77, torch.bfloat16, "float8_e4m3fnuz"),
    ),
    # The feed-forwards of Stable Diffusion 1.5 and SDXL.
    real=(
        _sample(8192, 1280),
        _sample(8192, 2560),
        _sample(512, 5120),
        _sample(2048, 5120),
        *(_sample(2048, 5120, to=to) for to in LIMITS if to != "int8"),
    ),
    tiny=(_sample(6, 4, torch.float64),),
    empty=(_sample(0, 16),),
    promises={"_geglu_8bit": KernelPromise(bound_by_memory=True)},
    fits=fits,
)

TUNING = Tuning(
    space=_space,
    buckets=(
        Bucket({"f": [1, 1792]}, _sample(8192, 1280)),
        Bucket({"f": [1793, 3584]}, _sample(8192, 2560)),
        Bucket({"f": [3585, 8192]}, _sample(2048, 5120)),
    ),
    work=_work,
    untimed="triton",
    # Blocks of SD 1.5 at 512x512 and of SDXL at 1024x1024; 2 maps are one picture with guidance.
    timed=(_sample(2 * 4096, 1280), _sample(2 * 1024, 2560), _sample(2 * 4096, 2560), _sample(2 * 1024, 5120)),
)
