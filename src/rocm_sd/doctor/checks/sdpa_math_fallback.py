"""Does torch really use fused attention?

It takes plain math silently where the fused kernels refuse.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from rocm_sd import arch
from rocm_sd.doctor.check import Finding, Fix, Probe, fine, measured_check, number, problem, rows, text
from rocm_sd.doctor.facts import Facts, known_as
from rocm_sd.doctor.probing.attention import attention, chosen_backend, why_not
from rocm_sd.doctor.probing.common import Place, medians, random
from rocm_sd.doctor.probing.isolated import isolated_on

if TYPE_CHECKING:
    from collections.abc import Mapping


__all__ = ["sdpa_math_fallback"]

# Name, heads, columns of a head, keys (None: as many as queries).
_SHAPES = (
    ("SD 1.5 self-attention", 8, 40, None),
    ("SDXL self-attention", 10, 64, None),
    ("SDXL cross-attention", 10, 64, 77),
    ("VAE middle block", 1, 512, None),
)
_LIMIT_S = 18.0
# Above it plain math is the right choice on gfx11, where the fused kernels are wrong; and no UNet has such heads.
_LARGEST_FUSED_HEAD = 256
_BACKENDS = ("math", "flash", "efficient", "cudnn", "overrideable")
_EXPERIMENTAL = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
_OWN_KERNEL = "rocm-sd has an attention kernel of its own for this; type: rocm-sd tune"


def measure(*, device: str | None = None, quick: bool = False) -> dict[str, Any]:
    return isolated_on(device, _rows, quick, limit_s=_LIMIT_S).required("attention could not be timed")


def _rows(where: Place, quick: bool) -> dict[str, Any]:
    # 4096 queries are 512 x 512 pixels in SD 1.5 and a level of 1024 x 1024 in SDXL.
    queries = (1024 if quick else 4096) if where.is_gpu else 256
    return {"rows": [_row(where, queries, *shape) for shape in _SHAPES]}


def _row(where: Place, queries: int, name: str, heads: int, head: int, keys: int | None) -> dict[str, Any]:
    inputs = [random(where, 1, heads, queries if n == 0 else keys or queries, head, seed=n) for n in (0, 1, 2)]
    chosen = chosen_backend(inputs)
    taken = medians({"default": partial(attention, inputs), "math": partial(attention, inputs, "math")}, where)
    return {
        "name": name,
        "queries": queries,
        "keys": keys or queries,
        "heads": heads,
        "head": head,
        "chosen": chosen,
        "why_not_fused": why_not(where, inputs) if chosen == "math" else [],
        "default_ms": taken["default"],
        "math_ms": taken["math"],
    }


@measured_check(
    measures="which backend torch chooses at the attention shapes of SD 1.5, SDXL and the VAE, its own reasons, and "
    "the time compared with plain math",
    reports="ROCm/aotriton#16 ROCm/TheRock#1364 ROCm/TheRock#1925 ROCm/ROCm#5834 "
    "AUTOMATIC1111/stable-diffusion-webui#9073",
    probe=Probe("sdpa_backend", measure),
)
def sdpa_math_fallback(facts: Facts, answer: Mapping[str, Any]) -> Finding:
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
        return problem(says, means, _fix(facts), measured)
    gains = [number(row, "math_ms") / number(row, "default_ms") for row in table if _chosen(row) != "math"]
    chosen = sorted({chosen for chosen, _, _ in heads})
    gain = f", up to {max(gains):.1f} times as fast as plain math" if gains else ""
    return fine(f"torch takes {', '.join(chosen)}{gain}.", measured=measured)


def _chosen(row: Mapping[str, Any]) -> str:
    chosen = text(row, "chosen")
    if chosen not in _BACKENDS:
        raise ValueError(f"chosen is {chosen!r}")
    return chosen


def _fix(facts: Facts) -> Fix:
    gfx = facts.meant.gfx if facts.meant else None
    known = known_as(gfx) if gfx else None
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
