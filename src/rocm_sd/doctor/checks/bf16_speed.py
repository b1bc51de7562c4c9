"""Is bfloat16 as fast as float16?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rocm_sd.doctor.answers import number, on_the_gpu, text
from rocm_sd.doctor.check import CannotRun, Check, Finding, Fix, Status

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.doctor.facts import Facts

__all__ = ["CHECK"]

# Where the matrix unit has both, they run at one rate; where bfloat16 is emulated or at half rate it is twice or more.
_HARM = 1.5
_FIX = Fix(
    "Make pictures in float16. In ComfyUI start with --fp16-unet --fp16-vae. For SDXL take a VAE that is safe "
    "in float16 (madebyollin/sdxl-vae-fp16-fix)."
)


def judge(_facts: Facts, answer: Mapping[str, Any]) -> Finding:
    half, brain = answer["float16"], answer["bfloat16"]
    if half["gemm_ms"] is None:
        raise CannotRun(f"float16 does not run: {text(half, 'error')}")
    measured = {"float16": dict(half), "bfloat16": dict(brain)}
    if brain["gemm_ms"] is None:
        says = f"bfloat16 does not run: {text(brain, 'error')}."
        return Finding(
            Status.PROBLEM, says, "A program that chooses bfloat16 by itself fails or crashes.", _FIX, measured
        )
    ratios = {kind: number(brain, f"{kind}_ms") / number(half, f"{kind}_ms") for kind in ("gemm", "conv")}
    says = (
        f"bfloat16 takes {ratios['gemm']:.2g} times as long as float16 in GEMMs, {ratios['conv']:.2g} in convolutions."
    )
    if max(ratios.values()) > _HARM:
        means = "Models that programs load in bfloat16, such as Flux, run that much slower than in float16."
        return Finding(Status.PROBLEM, says, means, _FIX, measured)
    return Finding(Status.OK, says, measured=measured)


CHECK = Check(
    name="bf16_speed",
    question="Is bfloat16 as fast as float16?",
    measures="a GEMM and a convolution of a UNet in either dtype, each in a process of its own",
    links=(
        "https://github.com/unslothai/unsloth/issues/7682",
        "https://github.com/patientx/ComfyUI-Zluda/issues/22",
        "https://github.com/ROCm/triton/issues/892",
        "https://github.com/ROCm/ROCm/issues/5191",
    ),
    run=on_the_gpu("half_precision", judge),
)
