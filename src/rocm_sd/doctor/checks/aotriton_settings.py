"""Is torch's fused attention switched on where it needs a switch?"""

from __future__ import annotations

from rocm_sd.doctor.check import Finding, Fix, Probes, check, fine, not_here, problem, unknown
from rocm_sd.doctor.facts import Facts, numbers

__all__ = ["aotriton_settings"]

VARIABLE = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
# What torch's own tests call experimental (torch/testing/_internal/common_cuda.py), and until when.
_EXPERIMENTAL = frozenset({"gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1152", "gfx1153", "gfx1200"})
# gfx1100 was put back to experimental in torch 2.9 (AOTriton 0.11); both left it with AOTriton 0.12, which PyTorch's
# own wheels have from 2.13 on.
_EXPERIMENTAL_BEFORE = {"gfx1100": (2, 13), "gfx1151": (2, 13)}
_MEANS = "Attention silently runs as plain products: slower, and with memory that grows with the square of the area."
_IN_PARTS = Fix(
    "Compute attention in parts: pipe.enable_attention_slicing() in Diffusers, --opt-sub-quad-attention in A1111, "
    "--use-split-cross-attention in ComfyUI."
)
_PLAIN = frozenset({"gfx90a", "gfx942", "gfx950", "gfx1201"})


@check(
    measures=f"{VARIABLE}, the GPU's gfx and torch's version",
    reports="ROCm/aotriton#16 ROCm/TheRock#1364 ROCm/TheRock#1925 AUTOMATIC1111/stable-diffusion-webui#9073 "
    "pytorch/pytorch/pull/166397 ROCm/pytorch/pull/3313",
)
def aotriton_settings(facts: Facts, _probes: Probes) -> Finding:
    meant = facts.meant
    if meant is None or meant.gfx is None or facts.torch.build != "rocm":
        return not_here("AOTriton is not used: there is no AMD GPU, or torch is not built for ROCm.")
    gfx = meant.gfx
    if gfx.startswith("gfx10") or gfx in {"gfx906", "gfx908"}:
        says = f"torch has no fused attention for {gfx}: AOTriton has no kernels for it, whatever {VARIABLE} says."
        return problem(says, _MEANS, _IN_PARTS)
    until = _EXPERIMENTAL_BEFORE.get(gfx)
    if gfx in _PLAIN or (until is not None and numbers(facts.torch.version) >= until):
        return fine(f"torch {facts.torch.version} has fused attention on {gfx} without a switch.")
    if until is None and gfx not in _EXPERIMENTAL:
        return unknown(f"Whether AOTriton wants {VARIABLE} on {gfx} is not known.")
    return _needed(facts, gfx)


def _needed(facts: Facts, gfx: str) -> Finding:
    if facts.environment.get(VARIABLE, "0") not in {"0", ""}:
        means = "That the results are right, sdpa_numerics measures."
        return fine(f"{VARIABLE} is set, as {gfx} needs.", means)
    return problem(
        f"{gfx} is experimental for the AOTriton of torch {facts.torch.version}, and {VARIABLE} is not set.",
        _MEANS,
        # Off, the answer is right and slow; on, it is wrong for some heads on some GPUs: sdpa_numerics must be asked.
        Fix(f"Set {VARIABLE}=1, and look at sdpa_numerics again.", env={VARIABLE: "1"}, safe=False),
    )
