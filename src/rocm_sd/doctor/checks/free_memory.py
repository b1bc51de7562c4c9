"""Is enough of the GPU's memory free?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_sd.doctor.check import CannotRun, Finding, Fix, Probes, check, fine, not_here, problem

if TYPE_CHECKING:
    from rocm_sd.doctor.facts import Facts

__all__ = ["free_memory"]

_GIB = 2**30
# The weights of Stable Diffusion 1.5 in half precision are 2 GiB, and drawing 512x512 needs about one more.
_LEAST = 3 * _GIB
# A desktop and a browser hold one to three GiB; beyond half of the memory another program works on the GPU.
_HELD_BY_OTHERS = 0.5


@check(
    measures="free and total memory of the GPU in use, as torch tells them, or else the kernel",
    reports="ROCm/ROCm#3580 Comfy-Org/ComfyUI#9922 unslothai/unsloth#7960",
)
def free_memory(facts: Facts, _probes: Probes) -> Finding:
    used = facts.used
    if used is None:
        return not_here("There is no GPU.")
    free, total = used.vram_free, used.vram_total
    if facts.torch.devices:
        free, total = facts.torch.devices[0].free, facts.torch.devices[0].total
    if free is None or not total:
        raise CannotRun("neither torch nor the kernel tells how much memory is free")
    name = facts.called(used)
    if free > total:
        raise CannotRun(f"{name} reports more free memory ({free / _GIB:.1f} GiB) than it has ({total / _GIB:.1f} GiB)")
    seen = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB of {name} are free"
    measured = {"free": free, "total": total}
    fix = Fix("End the programs that hold the rest, and look again.", commands=("rocm-smi --showpids",))
    if total < _LEAST:
        means = "Stable Diffusion 1.5 does not fit without moving parts of it out and in."
        fix = Fix("Ask for the smaller way: rocm_sd.optimize(pipe, level='memory').")
    elif free < _LEAST:
        means = "Another program holds it. A picture will fail, or spill into the system's memory and crawl."
    elif free < (1 - _HELD_BY_OTHERS) * total:
        means = "Another program holds more than half of it. Large pictures will fail, or crawl."
    else:
        return fine(f"{seen}.", measured=measured)
    return problem(f"{'Only ' if free < _LEAST else ''}{seen}.", means, fix, measured)
