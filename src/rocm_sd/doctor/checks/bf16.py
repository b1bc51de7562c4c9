"""Has the GPU bfloat16, at the speed of float16?"""

from __future__ import annotations

from rocm_sd.doctor.check import Finding, Fix, Probes, check, fine, not_here, problem, unknown
from rocm_sd.doctor.facts import Facts, known_as

__all__ = ["bf16"]


@check(
    measures="the table of architectures: whether bfloat16 has instructions, and their rate",
    reports="unslothai/unsloth#7682 patientx/ComfyUI-Zluda#22 Comfy-Org/ComfyUI#15006",
)
def bf16(facts: Facts, _probes: Probes) -> Finding:
    meant = facts.meant
    if meant is None or meant.gfx is None:
        return not_here("There is no AMD GPU whose gfx is known.")
    known = known_as(meant.gfx)
    if known.has_bf16 is None:
        return unknown(f"{meant.gfx} is not in the table of architectures.")
    if not known.has_bf16:
        return problem(
            f"{meant.gfx} has no bfloat16 arithmetic, and torch says that it has.",
            "Programs that ask torch choose bfloat16: it is emulated, slowly, and Triton kernels end the process.",
            _FLOAT16,
        )
    half, brain = known.peak("float16"), known.peak("bfloat16")
    if half and brain and brain < 0.75 * half:
        return problem(
            f"{meant.gfx} does bfloat16 at {brain:.0f} TFLOP/s and float16 at {half:.0f}.",
            "A model in bfloat16 takes up to twice as long.",
            _FLOAT16,
            {"float16_tflops": half, "bfloat16_tflops": brain},
        )
    says = f"{meant.gfx} has bfloat16, by the table at the rate of float16." if brain else f"{meant.gfx} has bfloat16."
    return fine(says, "What the libraries make of it, bf16_speed measures.")


_FLOAT16 = Fix(
    "Load models in float16: from_pretrained(..., torch_dtype=torch.float16); ComfyUI: --fp16-unet --fp16-vae. "
    "The VAE of SDXL needs fp16-safe weights (madebyollin/sdxl-vae-fp16-fix) or float32."
)
