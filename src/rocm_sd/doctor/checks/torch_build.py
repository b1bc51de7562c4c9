"""Is this the torch that fits the GPU?"""

from __future__ import annotations

from rocm_sd.doctor.check import CannotRun, Finding, Fix, Probes, check, fine, not_here, problem
from rocm_sd.doctor.facts import Facts, numbers
from rocm_sd.doctor.wheels import REFUSED, pip_line

__all__ = ["torch_build"]

# LLVM's targets whose code runs on every GPU of a generation.
_GENERIC = {
    "gfx94": "gfx9-4-generic",
    "gfx103": "gfx10-3-generic",
    "gfx11": "gfx11-generic",
    "gfx12": "gfx12-generic",
}


@check(
    measures="the GPU's gfx as the kernel tells it, against the GPUs that torch was built for",
    reports="ROCm/TheRock#7839 pytorch/pytorch#194498 unslothai/unsloth/pull/9829",
)
def torch_build(facts: Facts, _probes: Probes) -> Finding:
    meant = facts.meant
    if meant is None:
        return _without_amd(facts)
    torch = facts.torch
    if meant.gfx is None:
        return problem(
            "An AMD GPU is on the bus, but the kernel's compute driver does not list it.",
            "No ROCm program can use it.",
            Fix("Load the driver, and in a container pass the devices.", commands=_DRIVER_COMMANDS),
        )
    fix = _right_wheel(facts, meant.gfx)
    seen = f"{facts.called(meant)} is {meant.gfx}"
    if torch.version is None:
        return problem(f"{seen}, and torch is not installed.", "Nothing can run.", fix)
    if torch.build != "rocm":
        kind = "for CPUs only" if torch.build == "cpu" else "for NVIDIA GPUs"
        means = "Pictures are drawn by the processor, which is very slow."
        return problem(f"{seen}, but torch {torch.version} is built {kind}.", means, fix)
    if torch.error is not None:
        raise CannotRun(torch.error)
    return _of_rocm(facts, meant.gfx, seen, fix)


def _of_rocm(facts: Facts, gfx: str, seen: str, fix: Fix) -> Finding:
    torch = facts.torch
    if not torch.devices:
        return problem(
            f"{seen}, torch {torch.version} is built for ROCm, and it sees no GPU.",
            "Most often the user may not open /dev/kfd, or a *_VISIBLE_DEVICES variable hides the GPU.",
            Fix("Join the groups that may open it, then log out and in again.", commands=_GROUP_COMMANDS),
        )
    if not torch.arch_list:
        raise CannotRun("torch does not tell which GPUs it was built for")
    if _built_for(gfx, torch.arch_list):
        # The list is made from build flags, and has been seen to name GPUs whose kernels were missing.
        says = f"{seen}, and torch {torch.version} is built for it."
        return fine(says, "Whether the kernels are really there, kernels_present tries.")
    pretended = torch.devices[0].gfx or gfx
    if pretended != gfx and _built_for(pretended, torch.arch_list) and "HSA_OVERRIDE_GFX_VERSION" in facts.environment:
        says = f"{seen} and passes for {pretended}, which torch {torch.version} has kernels for."
        return fine(says, "Whether it may, gfx_override judges.")
    return problem(
        f"{seen}, which torch {torch.version} has no kernels for: it has {', '.join(torch.arch_list)}.",
        "Programs end with 'invalid device function', or only some operations fail.",
        fix,
        {"gfx": gfx, "arch_list": list(torch.arch_list)},
    )


def _without_amd(facts: Facts) -> Finding:
    torch = facts.torch
    if torch.version is None:
        return problem("torch is not installed.", "Nothing can run.", Fix("Install it.", commands=("make setup",)))
    if any(gpu.vendor == "nvidia" for gpu in facts.gpus) and torch.build != "cuda":
        return problem(
            f"There is an NVIDIA GPU, but torch {torch.version} is not built for it.",
            "Pictures are drawn by the processor.",
            Fix("Install the build from PyPI.", commands=("pip install --force-reinstall torch",)),
        )
    if any(gpu.vendor == "nvidia" for gpu in facts.gpus):
        idle = [facts.called(card) for card in facts.cards]
        means = f"{', '.join(idle)} stays unused: one torch serves one vendor." if idle else ""
        return fine(f"There is an NVIDIA GPU, and torch {torch.version} is built for CUDA.", means)
    return not_here("The kernel lists no GPU.")


def _right_wheel(facts: Facts, gfx: str) -> Fix:
    gfxs = tuple(gpu.gfx for gpu in (facts.cards or facts.amd) if gpu.gfx)
    line = pip_line(gfxs, numbers(facts.python)) or pip_line((gfx,), numbers(facts.python))
    if line is not None:
        return Fix("Install the torch that has its kernels.", commands=(line,))
    reason = REFUSED.get(
        gfx, f"neither PyTorch nor AMD is known to publish a wheel for {gfx} and Python {facts.python}"
    )
    return Fix(f"There is no torch to recommend: {reason}. The CPU build works.")


def _built_for(gfx: str, arch_list: tuple[str, ...]) -> bool:
    names = {name.split(":")[0] for name in arch_list}
    return gfx in names or any(gfx.startswith(start) and name in names for start, name in _GENERIC.items())


_DRIVER_COMMANDS = ("ls -l /dev/kfd", "sudo modprobe amdgpu")
_GROUP_COMMANDS = ("groups", "sudo usermod -a -G render,video $LOGNAME")
