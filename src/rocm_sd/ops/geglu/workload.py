"""The calls that count: what geglu is proven on, tuned for and timed at."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.kernels.configs.geglu import GegluConfig
from rocm_sd.ops.definition import Bucket, KernelPromise, Tuning, Verification, Work
from rocm_sd.ops.eight_bits import LIMITS, fits, rounded_to
from rocm_sd.ops.geglu import reference
from rocm_sd.ops.samples import Draw, Sample, dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rocm_sd.arch import Arch
    from rocm_sd.tuning import Problem

__all__ = ["TUNING", "VERIFICATION", "problem"]


def problem(
    x: torch.Tensor, _bias: torch.Tensor | None = None, _scale: torch.Tensor | None = None, to: str | None = None
) -> Problem:
    F = x.shape[-1] // 2
    return {"m": x.numel() // (2 * F), "f": F, "dtype": dtype_name(x.dtype), **rounded_to(to)}


def _sample(rows: int, F: int, dtype: torch.dtype, *, bias: bool = True, to: str | None = None) -> Sample:
    def build(draw: Draw) -> tuple[Any, ...]:
        given = draw(rows, 2 * F, std=2.0), draw(2 * F) if bias else None
        # So that some values are beyond the limit.
        return given if to is None else (*given, draw(1, mean=6.0 / LIMITS[to], std=0.0, dtype=torch.float32), to)

    parts = f"{'' if bias else ', bare'}{'' if to is None else f', to {to}'}"
    return Sample(f"{rows}x{F}, {dtype_name(dtype)}{parts}", dtype, build)


def _real(rows: int, F: int, to: str | None = None) -> Sample:
    return _sample(rows, F, torch.float16, to=to)


def _space(problem: Problem, arch: Arch) -> Iterator[GegluConfig]:
    """8 or 16 outputs a lane, so that every load is 16 bytes, in tiles that end where a row of the UNet does."""
    wave = arch.wave_size or 32
    for block_f, warps, values in product((256, 512), (2, 4, 8), (8, 16)):
        rows = values * warps * wave // block_f
        if rows >= 1 and (block_f == 256 or int(problem["f"]) % block_f == 0):
            yield GegluConfig(block_f, rows, warps)


def _work(x: torch.Tensor, *_rest: Any) -> Work:
    # 20 operations an output; two values read and one written for each.
    return Work(10.0 * x.numel(), 1.5 * x.numel() * x.element_size())


VERIFICATION = Verification(
    implementation="triton",
    kernels="rocm_sd.kernels.triton.geglu",
    reference=reference.geglu,
    problem=problem,
    small=(
        _sample(5, 320, torch.float16),
        _sample(3, 77, torch.bfloat16),
        _sample(2, 96, torch.float32, bias=False),
        _sample(1, 1, torch.float16),
        _sample(5, 96, torch.float16, to="int8"),
        _sample(4, 96, torch.float16, to="float8_e4m3fn"),
        _sample(3, 77, torch.bfloat16, to="float8_e4m3fnuz"),
    ),
    # The feed-forwards of Stable Diffusion 1.5 and SDXL.
    real=(_real(8192, 1280), _real(2048, 2560), _real(512, 5120), _real(2048, 5120),
          *(_real(2048, 5120, to) for to in LIMITS)),
    tiny=(_sample(6, 4, torch.float64), _sample(6, 4, torch.float64, bias=False)),
    empty=(_sample(0, 16, torch.float16),),
    promises={"_geglu": KernelPromise(bound_by_memory=True)},
    fits=fits,
)  # fmt: skip

TUNING = Tuning(
    space=_space,
    buckets=(
        Bucket({"m": [1, 1024]}, _real(512, 5120)),
        Bucket({"m": [1025, 4096]}, _real(2048, 2560)),
        Bucket({"m": [4097, 2**31]}, _real(8192, 2560)),
    ),
    work=_work,
    untimed="triton",
    # Blocks of SD 1.5 at 512x512 and of SDXL at 1024x1024; 2 maps are one picture with guidance, 8 are four.
    timed=(
        _real(2 * 4096, 1280), _real(2 * 64, 5120), _real(2 * 1024, 5120), _real(8 * 4096, 2560), _real(8 * 1024, 5120),
    ),
)  # fmt: skip
