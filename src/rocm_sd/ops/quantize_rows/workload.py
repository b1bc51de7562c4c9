"""The calls that count: what quantize_rows is proven on, tuned for and timed at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.kernels.configs.quantize_rows import QuantizeRowsConfig
from rocm_sd.ops.definition import Bucket, KernelPromise, Tuning, Verification, Work
from rocm_sd.ops.eight_bits import LIMITS, fits
from rocm_sd.ops.quantize_rows import reference
from rocm_sd.ops.samples import Draw, Sample, dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rocm_sd.arch import Arch
    from rocm_sd.tuning import Problem

__all__ = ["TUNING", "VERIFICATION", "problem"]


def problem(x: torch.Tensor, to: str, scale: torch.Tensor | None = None) -> Problem:
    K = x.shape[-1]
    return {"m": x.numel() // K, "k": K, "to": to, "given": int(scale is not None), "dtype": dtype_name(x.dtype)}


def _sample(M: int, K: int, to: str = "int8", dtype: torch.dtype = torch.float16, *, given: bool = False) -> Sample:
    def build(draw: Draw) -> tuple[Any, ...]:
        # So that some values are beyond the limit.
        scale = draw(1, mean=2.5 / LIMITS[to], std=0.0, dtype=torch.float32) if given else None
        return draw(M, K, std=3.0), to, scale

    return Sample(f"{M}x{K} to {to}{', given scale' if given else ''}, {dtype_name(dtype)}", dtype, build)


def _space(problem: Problem, arch: Arch) -> Iterator[QuantizeRowsConfig]:
    """Up to 32 values a lane."""
    wave, k = arch.wave_size or 32, int(problem["k"])
    for warps in (1, 2, 4, 8):
        if warps == 1 or (k <= 32 * warps * wave and warps * wave <= k):
            yield QuantizeRowsConfig(warps)


def _work(x: torch.Tensor, *_rest: Any) -> Work:
    return Work(4.0 * x.numel(), x.numel() * (x.element_size() + 1.0))


VERIFICATION = Verification(
    implementation="triton",
    kernels="rocm_sd.kernels.triton.quantize_rows",
    reference=reference.quantize_rows,
    problem=problem,
    small=(
        _sample(5, 320),
        _sample(3, 77, dtype=torch.bfloat16),
        _sample(4, 64, given=True),
        _sample(3, 96, "float8_e4m3fn"),
        _sample(5, 45, "float8_e4m3fn", torch.bfloat16, given=True),
        _sample(3, 96, "float8_e4m3fnuz"),
        _sample(5, 45, "float8_e4m3fnuz", torch.bfloat16, given=True),
        _sample(1, 1),
    ),
    # The inputs of SDXL's linears.
    real=(_sample(2048, 1280), _sample(8192, 640), _sample(2048, 5120), _sample(2048, 1280, "float8_e4m3fn"),
          _sample(2048, 1280, "float8_e4m3fnuz"), _sample(2048, 1280, given=True)),
    tiny=(_sample(6, 4, dtype=torch.float64), _sample(6, 4, dtype=torch.float64, given=True)),
    empty=(_sample(0, 16),),
    promises={"_quantize_rows": KernelPromise(bound_by_memory=True)},
    fits=fits,
)  # fmt: skip

TUNING = Tuning(
    space=_space,
    buckets=(
        Bucket({"k": [1, 1024]}, _sample(8192, 640)),
        Bucket({"k": [1025, 2560]}, _sample(2048, 1280)),
        Bucket({"k": [2561, 2**31]}, _sample(2048, 5120)),
    ),
    work=_work,
    untimed="triton",
    timed=tuple(
        _sample(M, K, "float8_e4m3fn", given=True)
        for M, K in ((2048, 1280), (2048, 5120), (8192, 640), (8192, 2560), (8192, 320), (8192, 1280), (2048, 640))
    ),
)
