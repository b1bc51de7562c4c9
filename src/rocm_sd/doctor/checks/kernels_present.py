"""Does each kind of kernel run on the GPU, and give the right numbers?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_sd.doctor.check import CannotRun, Check, Finding, Fix, Status
from rocm_sd.doctor.facts import numbers
from rocm_sd.doctor.wheels import pip_line

if TYPE_CHECKING:
    from rocm_sd.doctor.check import Probes
    from rocm_sd.doctor.facts import Facts

__all__ = ["CHECK"]

_KINDS = {"elementwise": "elementwise", "gemm": "matrix product", "conv": "convolution", "sdpa": "attention"}
_OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"


def run(facts: Facts, probes: Probes) -> Finding:
    if facts.torch.version is None:
        return Finding(Status.NOT_HERE, "torch is not installed.")
    told = probes.ask("smoke")
    failed: dict[str, str] = {}
    for kind, name in _KINDS.items():
        answer = told.get(kind)
        if not isinstance(answer, dict) or not isinstance(answer.get("ok"), bool):
            raise CannotRun(f"the answer on the {name} kernel could not be read: {answer!r}")
        if not answer["ok"]:
            failed[kind] = str(answer.get("error") or "no reason was given")
    where = told.get("device")
    kind_of_device = where.get("kind") if isinstance(where, dict) else None
    if facts.gpus and kind_of_device == "cpu":
        raise CannotRun("torch sees no GPU, so the kernels ran on the CPU")
    place = "on the CPU" if kind_of_device == "cpu" else "on the GPU"
    if not failed:
        return Finding(Status.OK, f"Elementwise, matrix product, convolution and attention run {place}.")
    reasons = "; ".join(f"{_KINDS[kind]}: {reason}" for kind, reason in failed.items())
    return Finding(
        Status.PROBLEM,
        f"{len(failed)} of {len(_KINDS)} kinds of kernel fail {place}: {reasons}.",
        "Kernels for this GPU are missing or broken, and pictures fail where they are needed.",
        _fix(facts),
        {"failed": failed},
    )


def _fix(facts: Facts) -> Fix:
    """The nearest cause first: another GPU than the one that is meant, then another name for it, then the wheel."""
    meant, gfx = facts.meant, facts.meant.gfx if facts.meant else None
    if meant is not None and facts.cards and facts.used is not None and facts.used.integrated:
        index = str(meant.index)
        return Fix(
            f"Use the card: HIP_VISIBLE_DEVICES={index}; integrated_gpu says more.",
            env={"HIP_VISIBLE_DEVICES": index},
            safe=True,
        )
    if _OVERRIDE in facts.environment and gfx in facts.torch.arch_list and facts.torch.devices:
        return Fix(f"Unset {_OVERRIDE}; gfx_override says more.", unset=(_OVERRIDE,), safe=True)
    line = pip_line((gfx,), numbers(facts.python)) if gfx else None
    if line is None:
        return Fix("Install a torch that is built for this GPU; gfx_override and torch_build say more.")
    return Fix("Install the torch that has its kernels; gfx_override may know a shorter way.", commands=(line,))


CHECK = Check(
    name="kernels_present",
    question="Does each kind of kernel run on the GPU, and give the right numbers?",
    measures="one small call of each kind, each in a process of its own, against the CPU in float64",
    links=(
        "https://github.com/ROCm/TheRock/issues/7839",
        "https://github.com/pytorch/pytorch/issues/194498",
        "https://github.com/patientx-cfz/comfyui-rocm/issues/71",
    ),
    run=run,
)
