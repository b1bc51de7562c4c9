"""Does Triton compile and run on this GPU?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rocm_sd import arch
from rocm_sd.doctor.answers import flag, on_the_gpu, text
from rocm_sd.doctor.check import CannotRun, Check, Finding, Fix, Status

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.doctor.check import Probes
    from rocm_sd.doctor.facts import Facts

__all__ = ["CHECK"]

# `--quick` leaves out the last.
_KERNELS = {
    "add_float32": "a sum in float32",
    "multiply_float16": "a product in float16",
    "multiply_bfloat16": "a product in bfloat16",
}


def judge(facts: Facts, answer: Mapping[str, Any]) -> Finding:
    tried = {name: answer[name] for name in _KERNELS if name in answer}
    # A probe that tried nothing has no pass to give.
    failed = [name for name in ("add_float32", "multiply_float16") if not flag(answer[name], "ok")]
    measured = {"version": answer["version"], **tried}
    if failed and _is_unsupported(facts):
        gfx = facts.meant.gfx if facts.meant else None
        says = f"Triton does not compile for {gfx}: {text(tried[failed[0]], 'error')}."
        return Finding(Status.NOT_HERE, says, "rocm-sd uses stock torch; do without torch.compile.", measured=measured)
    if failed:
        told = "; ".join(f"{_KERNELS[name]}: {text(tried[name], 'error')}" for name in failed)
        means = "torch.compile fails or crashes. rocm-sd uses stock torch where Triton does not work, and is slower."
        return Finding(Status.PROBLEM, f"Triton does not work here: {told}.", means, _reinstall(facts), measured)
    if "multiply_bfloat16" in tried and not flag(tried["multiply_bfloat16"], "ok"):
        says = f"Triton works, but not in bfloat16: {text(tried['multiply_bfloat16'], 'error')}."
        means = "torch.compile and Triton kernels may end the program when a model is in bfloat16."
        return Finding(Status.PROBLEM, says, means, Fix("Load models in float16."), measured)
    return Finding(Status.OK, f"{len(tried)} small kernels compile, run and are right.", measured=measured)


def _is_unsupported(facts: Facts) -> bool:
    """By the table of architectures: no other Triton would help."""
    gfx = facts.meant.gfx if facts.meant else None
    # The rest of RDNA2 has the instructions of gfx1030, and no entry of its own in the table.
    return gfx is not None and arch.get("gfx1030" if gfx.startswith("gfx103") else gfx).triton_supported is False


def _reinstall(facts: Facts) -> Fix:
    wanted = facts.torch.wants_triton
    if wanted is None:
        return Fix("Install torch again, with the Triton of its own build. The check two_tritons says which are there.")
    return Fix(
        f"torch asks for {wanted}. The check two_tritons says which are there and what to type.",
        commands=("rocm-sd doctor two_tritons",),
    )


def run(facts: Facts, probes: Probes) -> Finding:
    if not any("triton" in name for name in facts.packages):
        return Finding(Status.NOT_HERE, "Triton is not installed; rocm-sd does without it.")
    found = on_the_gpu("triton_compile", judge)(facts, probes)
    if found.status is Status.PROBLEM and not _torch_runs(probes):
        raise CannotRun(f"torch's own kernels fail on this GPU as well, see kernels_present. {found.says}")
    return found


def _torch_runs(probes: Probes) -> bool:
    """Where torch's own kernels fail, Triton is not to blame; where that is not told, it may be."""
    try:
        told = probes.ask("smoke").get("elementwise")
    except CannotRun:
        return True
    return not isinstance(told, dict) or told.get("ok") is not False


CHECK = Check(
    name="triton_works",
    question="Does Triton compile and run on this GPU?",
    measures="a sum and products in float16 and bfloat16, compiled anew, each in a process of its own",
    links=(
        "https://github.com/ROCm/ROCm/issues/3060",
        "https://github.com/CS1o/Stable-Diffusion-Info/issues/68",
        "https://github.com/Comfy-Org/ComfyUI/issues/14868",
        "https://github.com/unslothai/unsloth/issues/7682",
        "https://github.com/ROCm/TheRock/issues/6467",
    ),
    run=run,
)
