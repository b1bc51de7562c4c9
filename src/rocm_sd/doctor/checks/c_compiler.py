"""Is there the C compiler that Triton needs while it runs?"""

from __future__ import annotations

from rocm_sd.arch.host import TRITON_PACKAGES
from rocm_sd.doctor.check import Finding, Fix, Probes, check, fine, not_here, problem
from rocm_sd.doctor.facts import Facts, known_as

__all__ = ["c_compiler"]

_FIX = Fix(
    "Install a compiler and Python's headers, by the line of your distribution (apt, dnf, pacman); or name one in CC.",
    commands=(
        "sudo apt install gcc python3-dev",
        "sudo dnf install gcc python3-devel",
        "sudo pacman -S gcc",
    ),
)


@check(
    measures="the compiler that Triton would take (CC, else gcc, else clang) and Python's headers, Python.h",
    reports="sgl-project/sglang#1117 gensyn-ai/rl-swarm#226",
)
def c_compiler(facts: Facts, _probes: Probes) -> Finding:
    idle = _why_not_needed(facts)
    if idle is not None:
        return not_here(idle)
    means = (
        "Triton builds the part that launches a kernel in C at its first use. Without it torch.compile fails, and "
        "rocm-sd uses stock torch in place of its Triton kernels."
    )
    if not facts.c_compiler:
        return problem("No C compiler is found: CC names none, and there is no gcc and no clang.", means, _FIX)
    if facts.python_header is False:
        says = f"Triton would take {facts.c_compiler}, but Python.h, which it includes, is not there."
        return problem(says, means, _FIX)
    return fine(f"Triton takes {facts.c_compiler}.")


def _why_not_needed(facts: Facts) -> str | None:
    if not any(name in facts.packages for name in TRITON_PACKAGES):
        return "Triton is not installed; nothing else needs a C compiler."
    if not facts.system.startswith("Linux"):
        return "Triton for other systems brings its own."
    if not (facts.gpus or facts.torch.devices):
        return "There is no GPU to compile for."
    gfx = facts.meant.gfx if facts.meant else None
    if gfx is not None and known_as(gfx).triton_supported is False:
        return f"Triton does not compile for {gfx}; nothing else needs a C compiler."
    return "No compiler was looked for when this machine was recorded." if facts.c_compiler is None else None
