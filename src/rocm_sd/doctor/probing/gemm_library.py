"""GEMMs of a UNet by each library that torch can call (hipBLASLt and rocBLAS, cuBLASLt and cuBLAS), and by its default.

Each library has a process of its own: one of them crashes on some cards.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from rocm_sd.arch.gemm_libraries import LIBRARIES, build_of_torch
from rocm_sd.doctor.probing.common import Cannot, medians, place, random
from rocm_sd.doctor.probing.isolated import isolated

__all__ = ["answer"]

# Rows, columns and depth: projections and feed-forward layers of SD 1.5 at 512 x 512, of SDXL, and a large square.
_SHAPES = ((4096, 320, 320), (8192, 320, 2560), (2048, 1280, 10240), (4096, 4096, 4096))
_SHAPES_SMALL = ((256, 320, 320), (128, 640, 640))
# Which of the two factors is stored transposed. NT is how a linear layer stores its weight.
_LAYOUTS = ("NN", "NT", "TN")
_DEFAULT = "default"
_LIMIT_S = 10.0


def answer(*, device: str | None = None, quick: bool = False) -> dict[str, Any]:
    """`libraries`: by name {"tflops": float | None, "rows": [...], "error"}; `default` is what torch does unasked."""
    build = build_of_torch()
    switches = {
        library.name: library.switch for library in LIBRARIES if library.build == build and library.name != "ck"
    }
    libraries: dict[str, dict[str, Any]] = {}
    told: dict[str, str] | None = None
    for name, switch in ({_DEFAULT: None} | switches).items():
        outcome = isolated(_rows, switch, device, quick, limit_s=_LIMIT_S)
        if outcome.answer is None:
            libraries[name] = {"tflops": None, "rows": [], "error": outcome.failed}
        else:
            told = outcome.answer["device"]
            libraries[name] = {"tflops": outcome.answer["tflops"], "rows": outcome.answer["rows"], "error": ""}
    if told is None:
        raise Cannot(f"no GEMM ran at all: {libraries[_DEFAULT]['error']}")
    return {"device": told, "libraries": libraries}


def _rows(switch: str | None, device: str | None, quick: bool) -> dict[str, Any]:
    import torch  # noqa: PLC0415 -- in the process that needs it

    where = place(device)
    if switch is not None:
        torch.backends.cuda.preferred_blas_library(switch)
    rows: list[dict[str, Any]] = []
    for m, n, k in _SHAPES_SMALL if quick or not where.is_gpu else _SHAPES:
        for layout in _LAYOUTS:
            left = random(where, m, k) if layout[0] == "N" else random(where, k, m).t()
            right = random(where, k, n, seed=1) if layout[1] == "N" else random(where, n, k, seed=1).t()
            taken = medians({"mm": partial(torch.mm, left, right)}, where)["mm"]
            rows.append({"m": m, "n": n, "k": k, "layout": layout, "ms": taken, "tflops": 2e-9 * m * n * k / taken})
    # Rate over all of them, as a picture spends its time, and not a mean of rates.
    work = sum(2e-9 * row["m"] * row["n"] * row["k"] for row in rows)
    return {"device": where.told(), "rows": rows, "tflops": work / sum(row["ms"] for row in rows)}
