"""Which heads torch's own fused attention gets wrong, by architecture: a table of reports, no measurement of ours.

On ROCm the fused kernels of scaled_dot_product_attention (flash and memory-efficient alike) are AOTriton's. The VAE's
middle block of Stable Diffusion has a head of 512.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rocm_sd.arch.types import Arch

__all__ = ["FUSED_HEADS", "FusedHeads", "why_not_fused"]


@dataclass(frozen=True)
class FusedHeads:
    """Heads of at most `largest` columns are right; `reports` are where larger ones were seen to be wrong."""

    largest: int
    reports: str


# gfx1201 was seen to be right at 512 (pytorch/pytorch#189849), and CDNA has no report. No entry: nothing is known
# against it.
_GFX11 = FusedHeads(256, "pytorch/pytorch#189849, ROCm/TheRock#6561, vllm-project/vllm-omni#7484")
FUSED_HEADS: dict[str, FusedHeads] = {
    "gfx1100": _GFX11,
    "gfx1101": _GFX11,
    "gfx1102": _GFX11,
    "gfx1103": _GFX11,
    "gfx1150": _GFX11,
    "gfx1151": _GFX11,
}


def why_not_fused(arch: Arch, head: int) -> str | None:
    """The reason to keep a head of so many columns from torch's fused attention there, or None."""
    known = FUSED_HEADS.get(arch.name)
    if known is None or head <= known.largest:
        return None
    limit = f"torch's fused attention is wrong above {known.largest} there: {known.reports}"
    return f"heads of {head} on {arch.name} ({limit})"
