"""A candidate from its compiled launches and what a workgroup of each does: `rocm_sd.tuning.ranking` gives the time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rocm_sd.tuning.ranking import Candidate, Code, Part, Program, model

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rocm_sd.arch import Arch
    from rocm_sd.kernels.config import Config

__all__ = ["modelled_candidate"]

_COMPILED = ("vgprs", "lds", "waves_per_simd", "wide_loads", "matrix_in_main")
# What HIP launches are counted for, beside what the model needs.
_COUNTED = ("coalescing", "conflicts")


def modelled_candidate(
    arch: Arch,
    config: Config,
    calls: Sequence[Mapping[str, Any]],
    programs: Sequence[Mapping[str, Any]],
    blemishes: tuple[str, ...],
) -> Candidate:
    kernels: list[dict[str, Any]] = []
    left_out: dict[str, None] = {}
    total = 0.0
    for call, counted in zip(calls, programs, strict=True):
        code = Code(**{**call["code"], "main": _as_part(call["code"]["main"]), "rest": _as_part(call["code"]["rest"])})
        program = counted["program"]
        program = Program(**{**program, "dots": tuple(tuple(dot) for dot in program["dots"])})
        x, y, z = call["grid"]
        modelled = model(arch, x * y * z, code, program)
        left_out.update(dict.fromkeys(modelled.left_out))
        total += modelled.seconds
        kernels.append(
            {
                "kernel": call["kernel"],
                "workgroups": x * y * z,
                **({"threads": code.waves * code.wave_size} if "coalescing" in counted else {}),
                **{name: call[name] for name in _COMPILED},
                **{name: counted[name] for name in _COUNTED if name in counted},
                "modelled_us": round(modelled.seconds * 1e6, 3),
                "bound_by": max(modelled.terms, key=lambda term: modelled.terms[term], default="unknown"),
            }
        )
    figures = {
        "vgprs": max(k["vgprs"] for k in kernels),
        "spills": 0,
        "lds": max(k["lds"] for k in kernels),
        "waves_per_simd": min(k["waves_per_simd"] for k in kernels),
        "kernels": kernels,
        "left_out": list(left_out),
    }
    return Candidate(config, round(total * 1e6, 3), None, blemishes, figures)


def _as_part(values: Mapping[str, Any]) -> Part:
    return Part(**{**values, "global_widths": tuple(values["global_widths"])})
