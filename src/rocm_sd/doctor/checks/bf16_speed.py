"""Is bfloat16 as fast as float16?"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from rocm_sd.doctor.check import CannotRun, Finding, Fix, Probe, fine, measured_check, number, problem, text
from rocm_sd.doctor.probing.common import Place, medians, random
from rocm_sd.doctor.probing.isolated import one_by_one

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.doctor.facts import Facts

__all__ = ["bf16_speed"]

_DTYPES = ("float16", "bfloat16")
_LIMITS_S = dict.fromkeys(_DTYPES, 9.0)
# Where the matrix unit has both, they run at one rate; where bfloat16 is emulated or at half rate it is twice or more.
_HARM = 1.5
_FIX = Fix(
    "Make pictures in float16. In ComfyUI start with --fp16-unet --fp16-vae. For SDXL take a VAE that is safe "
    "in float16 (madebyollin/sdxl-vae-fp16-fix)."
)


def measure(*, device: str | None = None, quick: bool = False) -> dict[str, Any]:
    """{"float16": {"gemm_ms", "conv_ms", "error"}, "bfloat16": ...}; some compilers abort the process on bfloat16."""
    calls = {dtype: (dtype, quick) for dtype in _DTYPES}
    answers = one_by_one(device, _times, calls, {"gemm_ms": None, "conv_ms": None}, _LIMITS_S)
    if answers["device"] is None:
        raise CannotRun(f"neither dtype ran: {answers['float16']['error']}")
    return answers


def _times(where: Place, name: str, quick: bool) -> dict[str, Any]:
    import torch  # noqa: PLC0415 -- in the process that needs it

    dtype = getattr(torch, name)
    small = quick or not where.is_gpu
    rows, depth, channels, size = (128, 320, 32, 16) if small else (4096, 2560, 320, 64)
    left, right = random(where, rows, depth, dtype=dtype), random(where, depth, depth, dtype=dtype, seed=1)
    picture = random(where, 1, channels, size, size, dtype=dtype)
    kernel = random(where, channels, channels, 3, 3, dtype=dtype, seed=1) * (channels * 9) ** -0.5
    calls = {
        "gemm": partial(torch.mm, left, right),
        "conv": partial(torch.nn.functional.conv2d, picture, kernel, padding=1),
    }
    taken = medians(calls, where)
    return {"gemm_ms": taken["gemm"], "conv_ms": taken["conv"], "error": ""}


@measured_check(
    measures="a GEMM and a convolution of a UNet in either dtype, each in a process of its own",
    reports="unslothai/unsloth#7682 patientx/ComfyUI-Zluda#22 ROCm/triton#892 ROCm/ROCm#5191",
    probe=Probe("half_precision", measure),
)
def bf16_speed(_facts: Facts, answer: Mapping[str, Any]) -> Finding:
    half, brain = answer["float16"], answer["bfloat16"]
    if half["gemm_ms"] is None:
        raise CannotRun(f"float16 does not run: {text(half, 'error')}")
    measured = {"float16": dict(half), "bfloat16": dict(brain)}
    if brain["gemm_ms"] is None:
        says = f"bfloat16 does not run: {text(brain, 'error')}."
        return problem(says, "A program that chooses bfloat16 by itself fails or crashes.", _FIX, measured)
    ratios = {kind: number(brain, f"{kind}_ms") / number(half, f"{kind}_ms") for kind in ("gemm", "conv")}
    says = (
        f"bfloat16 takes {ratios['gemm']:.2g} times as long as float16 in GEMMs, {ratios['conv']:.2g} in convolutions."
    )
    if max(ratios.values()) > _HARM:
        means = "Models that programs load in bfloat16, such as Flux, run that much slower than in float16."
        return problem(says, means, _FIX, measured)
    return fine(says, measured=measured)
