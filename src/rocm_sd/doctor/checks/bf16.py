"""Has the GPU bfloat16, at the speed of float16?"""

from __future__ import annotations

from rocm_sd.doctor.check import Check, Finding, Fix, Probes, Status
from rocm_sd.doctor.facts import Facts, known_as

__all__ = ["CHECK"]


def run(facts: Facts, _probes: Probes) -> Finding:
    meant = facts.meant
    if meant is None or meant.gfx is None:
        return Finding(Status.NOT_HERE, "There is no AMD GPU whose gfx is known.")
    known = known_as(meant.gfx)
    if known.has_bf16 is None:
        return Finding(Status.UNKNOWN, f"{meant.gfx} is not in the table of architectures.")
    if not known.has_bf16:
        return Finding(
            Status.PROBLEM,
            f"{meant.gfx} has no bfloat16 arithmetic, and torch says that it has.",
            "Programs that ask torch choose bfloat16: it is emulated, slowly, and Triton kernels end the process.",
            _FLOAT16,
        )
    half, brain = known.peak("float16"), known.peak("bfloat16")
    if half and brain and brain < 0.75 * half:
        return Finding(
            Status.PROBLEM,
            f"{meant.gfx} does bfloat16 at {brain:.0f} TFLOP/s and float16 at {half:.0f}.",
            "A model in bfloat16 takes up to twice as long.",
            _FLOAT16,
            {"float16_tflops": half, "bfloat16_tflops": brain},
        )
    says = f"{meant.gfx} has bfloat16, by the table at the rate of float16." if brain else f"{meant.gfx} has bfloat16."
    return Finding(Status.OK, says, "What the libraries make of it, bf16_speed measures.")


_FLOAT16 = Fix(
    "Load models in float16: from_pretrained(..., torch_dtype=torch.float16); ComfyUI: --fp16-unet --fp16-vae. "
    "The VAE of SDXL needs fp16-safe weights (madebyollin/sdxl-vae-fp16-fix) or float32."
)

CHECK = Check(
    name="bf16",
    question="Has the GPU bfloat16, at the speed of float16?",
    measures="the table of architectures: whether bfloat16 has instructions, and their rate",
    links=(
        "https://github.com/unslothai/unsloth/issues/7682",
        "https://github.com/patientx/ComfyUI-Zluda/issues/22",
        "https://github.com/Comfy-Org/ComfyUI/issues/15006",
    ),
    run=run,
)
