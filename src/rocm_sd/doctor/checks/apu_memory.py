"""How much of the system's memory may the processor's own GPU use?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_sd.doctor.check import CannotRun, Finding, Fix, Probes, check, fine, not_here, problem

if TYPE_CHECKING:
    from rocm_sd.doctor.facts import Facts, Gpu

__all__ = ["apu_memory"]

_GIB = 2**30
_PAGES_PER_GIB = 262144
# The driver gives half of the system's memory by itself; clearly less means that something holds it down.
_USUAL_SHARE = 0.45
# Below this SDXL does not fit beside its text encoders.
_COMFORT = 16 * _GIB


@check(
    measures="mem_info_vram_total and mem_info_gtt_total of the kernel, the system's memory, and torch's own count",
    reports="ROCm/ROCm#5444 ROCm/ROCm#5595 Comfy-Org/ComfyUI#14274",
)
def apu_memory(facts: Facts, _probes: Probes) -> Finding:
    used = facts.used
    if used is None or used.vendor != "amd" or not used.integrated:
        return not_here("No GPU that shares the system's memory is in use.")
    if used.vram_total is None or used.gtt_total is None:
        raise CannotRun("the kernel does not tell mem_info_vram_total and mem_info_gtt_total")
    own, shared = used.vram_total, used.gtt_total
    in_torch = facts.torch.devices[0].total if facts.torch.devices else None
    measured = {"vram_total": own, "gtt_total": shared, "torch_total": in_torch, "memory_total": facts.memory_total}
    seen = f"{facts.called(used)} owns {own / _GIB:.1f} GiB and may use {shared / _GIB:.1f} GiB of the system's"
    if facts.cards:
        return _with_a_card(facts, seen, in_torch, measured)
    reach = own + shared
    if in_torch is not None and in_torch < 0.75 * max(own, shared):
        return problem(
            f"{seen}, but torch sees {in_torch / _GIB:.1f} GiB.",
            "The runtime counts less than the kernel gives: models that would fit are refused.",
            Fix("A newer kernel and ROCm count it right; or raise the GPU's own memory in the firmware's settings."),
            measured,
        )
    system = facts.memory_total
    if system is not None and (reach < _USUAL_SHARE * (system + own) or reach < _COMFORT <= 0.7 * system):
        return problem(
            f"{seen}, of {system / _GIB:.1f} GiB.",
            "Models that would fit into the machine do not fit into what the GPU may use.",
            _raise_limit(system),
            measured,
        )
    means = "It is the same memory: moving a model's parts to the processor frees nothing."
    return fine(f"{seen}.", means, measured=measured)


def _with_a_card(facts: Facts, seen: str, in_torch: int | None, measured: dict[str, int | None]) -> Finding:
    card: Gpu | None = facts.meant
    assert card is not None
    counted = f", and torch counts {in_torch / _GIB:.1f} GiB as its own" if in_torch is not None else ""
    return problem(
        f"{seen}{counted}.",
        "Programs take the system's memory for video memory, and this GPU for a large card.",
        Fix(
            f"Use the card: HIP_VISIBLE_DEVICES={card.index}.",
            env={"HIP_VISIBLE_DEVICES": str(card.index)},
            safe=True,
        ),
        measured,
    )


def _raise_limit(system: int) -> Fix:
    gib = int(0.75 * system / _GIB)
    pages = gib * _PAGES_PER_GIB
    return Fix(
        f"Let it use {gib} GiB: add the kernel parameter ttm.pages_limit={pages} and start the machine anew.",
        # amdgpu.gttsize is the older way, and deprecated.
        commands=(
            f"sudo grubby --update-kernel=ALL --args=ttm.pages_limit={pages}   # or GRUB_CMDLINE_LINUX on Debian",
        ),
    )
