"""Does HSA_OVERRIDE_GFX_VERSION fit the real GPU?"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rocm_sd.arch.kfd import gfx_name
from rocm_sd.doctor.check import Finding, Fix, Probes, check, fine, not_here, problem, unknown

if TYPE_CHECKING:
    from rocm_sd.doctor.facts import Facts

__all__ = ["gfx_override"]

VARIABLE = "HSA_OVERRIDE_GFX_VERSION"
# The same instruction set as gfx1030 (LLVM makes them one generic target), and known to run its kernels.
_RUNS_GFX1030 = frozenset({"gfx1031", "gfx1032", "gfx1034"})
_UNSET = Fix(f"Unset {VARIABLE}.", unset=(VARIABLE,), safe=True)


@check(
    measures=f"{VARIABLE} against the GPU's gfx as the kernel tells it, and against the kernels that torch has",
    reports="ROCm/rocBLAS#1339 pytorch/pytorch#179653 ROCm/MIOpen#3954 Comfy-Org/ComfyUI#15001",
)
def gfx_override(facts: Facts, _probes: Probes) -> Finding:
    value = facts.environment.get(VARIABLE)
    meant = facts.meant
    if meant is None or meant.gfx is None:
        return not_here("There is no AMD GPU whose gfx is known.")
    built_for = {name.split(":")[0] for name in facts.torch.arch_list}
    if not value:
        return _unset(facts, meant.gfx, built_for)
    pretended = _gfx(value)
    if pretended is None:
        means = "ROCm cannot read it, and programs may see no GPU."
        return problem(f"{VARIABLE}={value} is not of the form 10.3.0.", means, _UNSET)
    if pretended == meant.gfx:
        return fine(f"{VARIABLE}={value} names the GPU that is there.", "It is harmless, and not needed.")
    return _pretending(meant.gfx, pretended, built_for, f"{VARIABLE}={value} makes {meant.gfx} pass for {pretended}")


def _pretending(gfx: str, pretended: str, built_for: set[str], says: str) -> Finding:
    if _instructions(pretended) != _instructions(gfx) or (gfx, pretended) == ("gfx1103", "gfx1100"):
        means = "Kernels of another chip are run: page faults, wrong pictures and frozen machines were seen."
        return problem(f"{says}, whose instructions or registers differ.", means, _UNSET)
    if gfx in built_for:
        means = f"torch has kernels for {gfx} itself; the override is left over, and keeps them from being used."
        return problem(f"{says}.", means, _UNSET)
    if pretended == "gfx1030" and gfx in _RUNS_GFX1030:
        means = "It is needed: this torch has no kernels for the real GPU. A torch for it would need no override."
        return fine(f"{says}, which has the same instructions.", means)
    return unknown(f"{says}; no report is known of how that pair does.", "kernels_present tries it.")


def _unset(facts: Facts, gfx: str, built_for: set[str]) -> Finding:
    if gfx not in _RUNS_GFX1030 or gfx in built_for or "gfx1030" not in built_for:
        return fine(f"{VARIABLE} is not set.")
    # It holds for every GPU of the machine, so it may be set only where each of them is of that kind.
    alone = all(gpu.gfx in _RUNS_GFX1030 | {"gfx1030"} for gpu in facts.amd)
    return problem(
        f"{VARIABLE} is not set, and torch has kernels for gfx1030 but none for {gfx}.",
        f"{gfx} has the instructions of gfx1030 and can run its kernels, once it is set. A torch for {gfx} is better.",
        Fix(f"Set {VARIABLE}=10.3.0.", env={VARIABLE: "10.3.0"}, safe=alone),
    )


def _gfx(value: str) -> str | None:
    """The value 10.3.0 as gfx1030, 9.0.10 as gfx90a."""
    found = re.fullmatch(r"(\d{1,2})\.(\d{1,2})\.(\d{1,2})", value.strip())
    if found is None:
        return None
    major, minor, stepping = (int(part) for part in found.groups())
    return gfx_name(major * 10000 + minor * 100 + stepping)


def _instructions(gfx: str) -> str:
    """The generation: gfx1031 is of gfx103, gfx90a of gfx90. gfx115 has instructions that gfx110 has not."""
    return gfx[:-1]
