"""Does torch silently take plain math where it should take fused attention?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rocm_sd import arch
from rocm_sd.doctor.answers import number, on_the_gpu, rows, text
from rocm_sd.doctor.check import Check, Finding, Fix, Status

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.doctor.facts import Facts

__all__ = ["CHECK"]

# Above it plain math is the right choice on gfx11, where the fused kernels are wrong; and no UNet has such heads.
_LARGEST_FUSED_HEAD = 256
_BACKENDS = ("math", "flash", "efficient", "cudnn", "overrideable")
_EXPERIMENTAL = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
_OWN_KERNEL = "rocm-sd has an attention kernel of its own for this; type: rocm-sd tune"


def judge(facts: Facts, answer: Mapping[str, Any]) -> Finding:
    table = rows(answer)
    # All of them are read before any is judged.
    heads = [(_chosen(row), number(row, "head"), row) for row in table]
    fallen = [row for chosen, head, row in heads if chosen == "math" and head <= _LARGEST_FUSED_HEAD]
    measured = {
        text(row, "name"): {key: row[key] for key in ("chosen", "default_ms", "math_ms", "why_not_fused")}
        for row in table
    }
    if fallen:
        row = fallen[0]
        why = row["why_not_fused"]
        because = f" torch says: {why[0]}" if why else ""
        says = (
            f"{text(row, 'name')} runs as plain math, {number(row, 'default_ms'):.3g} ms for {row['queries']} queries "
            f"({len(fallen)} of {len(table)} shapes).{because}"
        )
        means = "Attention takes several times as long, and memory grows with the square of the picture's area."
        return Finding(Status.PROBLEM, says, means, _fix(facts), measured)
    gains = [number(row, "math_ms") / number(row, "default_ms") for row in table if _chosen(row) != "math"]
    chosen = sorted({chosen for chosen, _, _ in heads})
    gain = f", up to {max(gains):.1f} times as fast as plain math" if gains else ""
    return Finding(Status.OK, f"torch takes {', '.join(chosen)}{gain}.", measured=measured)


def _chosen(row: Mapping[str, Any]) -> str:
    chosen = text(row, "chosen")
    if chosen not in _BACKENDS:
        raise ValueError(f"chosen is {chosen!r}")
    return chosen


def _fix(facts: Facts) -> Fix:
    gfx = facts.meant.gfx if facts.meant else None
    # The rest of RDNA2 has the instructions of gfx1030, and no entry of its own in the table.
    known = arch.get("gfx1030" if gfx.startswith("gfx103") else gfx) if gfx else None
    wmma = known is not None and known.matrix_unit is not None and known.matrix_unit.is_wmma
    if wmma and facts.environment.get(_EXPERIMENTAL) != "1":
        # Not safe: it turns on heads above 256 as well, which are wrong on gfx11.
        return Fix(
            f"Set {_EXPERIMENTAL}=1 before torch is started, then run this check and sdpa_numerics again.",
            env={_EXPERIMENTAL: "1"},
        )
    if known is not None and known.matrix_unit in (arch.MatrixUnit.NONE, arch.MatrixUnit.DOT):
        return Fix(
            f"torch has no fused attention for {gfx}. {_OWN_KERNEL}. In A1111 start with --opt-sub-quad-attention.",
            commands=("rocm-sd tune",),
        )
    return Fix(_OWN_KERNEL, commands=("rocm-sd tune",))


CHECK = Check(
    name="sdpa_math_fallback",
    question="Does torch really use fused attention?",
    measures="which backend torch chooses at the attention shapes of SD 1.5, SDXL and the VAE, its own reasons, and "
    "the time beside plain math",
    links=(
        "https://github.com/ROCm/aotriton/issues/16",
        "https://github.com/ROCm/TheRock/issues/1364",
        "https://github.com/ROCm/TheRock/issues/1925",
        "https://github.com/ROCm/ROCm/issues/5834",
        "https://github.com/AUTOMATIC1111/stable-diffusion-webui/issues/9073",
    ),
    run=on_the_gpu("sdpa_backend", judge),
)
