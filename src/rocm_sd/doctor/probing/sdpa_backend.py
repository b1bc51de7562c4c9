"""Which attention torch really takes at the shapes of Stable Diffusion, why, and what it gains over plain math."""

from __future__ import annotations

from functools import partial
from typing import Any

from rocm_sd.doctor.probing.attention import attention, chosen_backend, why_not
from rocm_sd.doctor.probing.common import Cannot, Place, medians, place, random
from rocm_sd.doctor.probing.isolated import isolated

__all__ = ["answer"]

# Name, heads, columns of a head, keys (None: as many as queries).
_SHAPES = (
    ("SD 1.5 self-attention", 8, 40, None),
    ("SDXL self-attention", 10, 64, None),
    ("SDXL cross-attention", 10, 64, 77),
    ("VAE middle block", 1, 512, None),
)
_LIMIT_S = 18.0


def answer(*, device: str | None = None, quick: bool = False) -> dict[str, Any]:
    outcome = isolated(_rows, device, quick, limit_s=_LIMIT_S)
    if outcome.answer is None:
        raise Cannot(f"attention could not be timed: {outcome.failed}")
    return outcome.answer


def _rows(device: str | None, quick: bool) -> dict[str, Any]:
    where = place(device)
    # 4096 queries are 512 x 512 pixels in SD 1.5 and a level of 1024 x 1024 in SDXL.
    queries = (1024 if quick else 4096) if where.is_gpu else 256
    return {"device": where.told(), "rows": [_row(where, queries, *shape) for shape in _SHAPES]}


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
