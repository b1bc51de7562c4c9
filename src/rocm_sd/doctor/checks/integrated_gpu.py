"""Is the card used, and not the processor's own GPU?"""

from __future__ import annotations

from rocm_sd.doctor.check import Finding, Fix, Probes, check, fine, not_here, problem, unknown
from rocm_sd.doctor.facts import Facts, Gpu, visible_to_torch

__all__ = ["integrated_gpu"]

_VISIBLE = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


@check(
    measures="the GPU that torch lists first, against all that the kernel lists; and the variables that hide GPUs",
    reports="Comfy-Org/ComfyUI#12598 patientx-cfz/comfyui-rocm#115 ROCm/ROCm#6137",
)
def integrated_gpu(facts: Facts, _probes: Probes) -> Finding:
    meant = facts.meant
    if meant is None:
        return not_here("There is no AMD GPU, or an NVIDIA GPU draws.")
    given = {name: facts.environment[name] for name in _VISIBLE if name in facts.environment}
    stale = _stale(facts, given)
    if stale is not None:
        return stale
    if facts.torch.build != "rocm":
        return not_here("torch is not built for ROCm, so it takes none of them; see torch_build.")
    used = facts.used
    if used is None:
        return unknown("Which GPU torch takes first is not known.")
    return _judged(facts, used, meant, tuple(given))


def _judged(facts: Facts, used: Gpu, meant: Gpu, given: tuple[str, ...]) -> Finding:
    seen = f"torch takes {facts.called(used)} first"
    if used.integrated and facts.cards:
        fix = Fix(
            f"Show torch the card alone: HIP_VISIBLE_DEVICES={meant.index}.",
            env={"HIP_VISIBLE_DEVICES": str(meant.index)},
            unset=tuple(name for name in given if name != "HIP_VISIBLE_DEVICES"),
            safe=True,
        )
        means = f"It is part of the processor; {facts.called(meant)} with {meant.compute_units} units stays idle."
        return problem(f"{seen}, which is {used.gfx} with {used.compute_units} units.", means, fix)
    if used.integrated:
        return fine(f"{seen}: it is part of the processor, and the only one.")
    return fine(f"{seen}, which is a card.")


def _stale(facts: Facts, given: dict[str, str]) -> Finding | None:
    """A number that names no GPU hides every GPU: it was right before another one was switched off."""
    count = len(facts.listed_amd)
    if not count:
        # What torch lists is what the variables have left: there is nothing to compare them with.
        return None
    for name, value in given.items():
        entries = [entry.strip() for entry in value.split(",")]
        beyond = [entry for entry in entries if entry.isdecimal() and int(entry) >= count]
        if beyond:
            says = f"{name}={value}, but there are {count} AMD GPUs, counted from 0."
        elif not visible_to_torch(facts) and all(entry.lstrip("-").isdecimal() or not entry for entry in entries):
            says = f"{name}={value} hides every GPU."
        else:
            continue
        fix = Fix(f"Unset {name}.", unset=(name,), safe=True)
        return problem(says, "torch sees no GPU, or fewer than there are.", fix)
    return None
