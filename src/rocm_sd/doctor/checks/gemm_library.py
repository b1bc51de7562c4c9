"""Does torch take the faster GEMM library?"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from rocm_sd.arch.torch_libraries import GEMM_LIBRARIES, build_of_torch
from rocm_sd.doctor.check import CannotRun, Finding, Fix, Probe, fine, measured_check, number, problem, text
from rocm_sd.doctor.probing.common import Place, medians, random
from rocm_sd.doctor.probing.isolated import one_by_one

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.doctor.facts import Facts

__all__ = ["gemm_library"]

# Rows, columns and depth: projections and feed-forward layers of SD 1.5 at 512 x 512, of SDXL, and a large square.
_SHAPES = ((4096, 320, 320), (8192, 320, 2560), (2048, 1280, 10240), (4096, 4096, 4096))
_SHAPES_SMALL = ((256, 320, 320), (128, 640, 640))
# Which of the two factors is stored transposed. NT is how a linear layer stores its weight.
_LAYOUTS = ("NN", "NT", "TN")
_DEFAULT = "default"
_LIMIT_S = 10.0
# The libraries differ by up to a fifth in either direction from shape to shape, the reported pain is 2.3 times.
_HARM = 1.3
_PREFER = "TORCH_BLAS_PREFER_HIPBLASLT"
_NAMES = {"rocblas": "rocBLAS", "hipblaslt": "hipBLASLt", "cublas": "cuBLAS", "cublaslt": "cuBLASLt"}


def measure(*, device: str | None = None, quick: bool = False) -> dict[str, Any]:
    """`libraries`: by name {"tflops": float | None, "rows": [...], "error"}; `default` is what torch does unasked.

    Each library has a process of its own: one of them crashes on some cards.
    """
    build = build_of_torch()
    switched = [library for library in GEMM_LIBRARIES if library.build == build and library.name != "ck"]
    calls = {_DEFAULT: (None, quick)} | {library.name: (library.switch, quick) for library in switched}
    limits = dict.fromkeys(calls, _LIMIT_S)
    libraries = one_by_one(device, _rows, calls, {"tflops": None, "rows": []}, limits)
    where = libraries.pop("device")
    if where is None:
        raise CannotRun(f"no GEMM ran at all: {libraries[_DEFAULT]['error']}")
    return {"device": where, "libraries": libraries}


def _rows(where: Place, switch: str | None, quick: bool) -> dict[str, Any]:
    import torch  # noqa: PLC0415 -- in the process that needs it

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
    return {"tflops": work / sum(row["ms"] for row in rows), "rows": rows, "error": ""}


@measured_check(
    measures="matrix products of UNet shapes in three layouts by torch's default and by each library, each in its own "
    "process",
    reports="ROCm/TheRock#5314 ROCm/ROCm#6271 pytorch/pytorch#138067",
    probe=Probe("gemm_library", measure),
)
def gemm_library(facts: Facts, answer: Mapping[str, Any]) -> Finding:
    libraries = answer["libraries"]
    rates = {name: number(each, "tflops") for name, each in libraries.items() if each["tflops"] is not None}
    errors = {name: text(each, "error") for name, each in libraries.items() if each["tflops"] is None}
    measured = {"tflops": rates, "errors": errors}
    if "default" in errors:
        return _broken(facts, rates, errors, measured)
    ours = rates.pop("default")
    if not rates:
        raise CannotRun("no library but torch's default could be timed")
    best = max(rates, key=rates.__getitem__)
    by_library = ", ".join(f"{_NAMES.get(name, name)} {rate:.3g}" for name, rate in rates.items())
    lost = "".join(f" {_NAMES.get(name, name)} fails: {why}." for name, why in errors.items())
    says = f"torch's GEMMs run at {ours:.3g} TFLOP/s; by library: {by_library}.{lost}"
    if rates[best] > _HARM * ours:
        means = f"The linear layers of every step run at {ours / rates[best]:.0%} of the speed that is there."
        return problem(says, means, _fix(best, facts), measured)
    return fine(says, measured=measured)


def _broken(
    facts: Facts, rates: Mapping[str, float], errors: Mapping[str, str], measured: Mapping[str, Any]
) -> Finding:
    if not rates:
        raise CannotRun(f"no GEMM ran: {errors['default']}")
    says = f"torch's default GEMM fails: {errors['default']}. These run: {', '.join(_NAMES.get(n, n) for n in rates)}."
    means = "No picture can be made with these settings."
    fix = _fix(max(rates, key=rates.__getitem__), facts)
    return problem(says, means, fix, measured)


def _fix(best: str, facts: Facts) -> Fix:
    name = _NAMES.get(best, best)
    if best == "rocblas":
        # Every build of torch for ROCm has rocBLAS, and it is right on every card: safe.
        return Fix(f"Set {_PREFER}=0, so that torch calls {name}.", env={_PREFER: "0"}, safe=True)
    if best == "hipblaslt" and facts.amd:
        # It crashed a card before: the user is to know that it was chosen.
        return Fix(f"Set {_PREFER}=1, so that torch calls {name}, and make a picture to try it.", env={_PREFER: "1"})
    return Fix(
        f'In your own code: torch.backends.cuda.preferred_blas_library("{best}"). rocm-sd tune finds it by itself.'
    )
