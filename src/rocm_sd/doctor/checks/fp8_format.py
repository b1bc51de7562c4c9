"""Which FP8 format has the GPU, and is something installed that takes it for the other?"""

from __future__ import annotations

from rocm_sd import arch
from rocm_sd.doctor.check import Finding, Fix, Probes, check, fine, not_here, problem, unknown
from rocm_sd.doctor.facts import Facts, known_as

__all__ = ["fp8_format"]

# Packages with kernels that hold the largest value of the OCP format, 448, as a number.
_TAKES_448 = ("torchao",)


@check(
    measures="the table of architectures, and the installed packages that are known to assume the OCP format",
    reports="ROCm/ROCm#6019 pytorch/ao/pull/4130 pytorch/ao#1066 vllm-project/vllm#51021",
)
def fp8_format(facts: Facts, _probes: Probes) -> Finding:
    meant = facts.meant
    if meant is None or meant.gfx is None:
        return not_here("There is no AMD GPU whose gfx is known.")
    format_ = known_as(meant.gfx).fp8
    if format_ is None:
        return unknown(f"{meant.gfx} is not in the table of architectures.")
    if format_ is arch.Fp8.NONE:
        means = "FP8 weights save memory and no time: they are turned to float16 before each product."
        return fine(f"{meant.gfx} has no FP8 arithmetic.", means)
    if format_ is arch.Fp8.OCP:
        return fine(f"{meant.gfx} has FP8 in the OCP format: float8_e4m3fn, largest value 448.")
    says = f"{meant.gfx} has FP8 in the fnuz format: float8_e4m3fnuz, largest value 240, and not 448"
    trusting = [f"{name} {facts.packages[name]}" for name in _TAKES_448 if name in facts.packages]
    if trusting:
        return problem(
            f"{says}; {', '.join(trusting)} has kernels that assume 448.",
            "Quantized weights come out as garbage where 448 is taken for granted; files hold the OCP format.",
            Fix(
                "Name the format (float8_dynamic_activation_float8_weight(torch.float8_e4m3fnuz, ...)) and leave "
                "block-wise scaling alone; or keep FP8 for storage and compute in float16."
            ),
        )
    return fine(f"{says}.", "Weights in a file are in the OCP format and must be converted, not copied.")
