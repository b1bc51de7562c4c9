"""A config, rated by its compiled launches and what a workgroup of each does: `ranking` gives the time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rocm_sd.tuning.ranking import RatedConfig, model
from rocm_sd.verify.programs import CountedHipLaunch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rocm_sd.arch import Arch
    from rocm_sd.kernels.config import Config
    from rocm_sd.tuning.static.tasks import CompiledLaunch
    from rocm_sd.verify.programs import CountedLaunch

__all__ = ["modelled_config"]

_COMPILED = ("vgprs", "lds", "waves_per_simd", "wide_loads", "matrix_in_main")


def modelled_config(
    arch: Arch,
    config: Config,
    launches: Sequence[CompiledLaunch],
    workgroups: Sequence[CountedLaunch],
    blemishes: tuple[str, ...],
) -> RatedConfig:
    kernels: list[dict[str, Any]] = []
    left_out: dict[str, None] = {}
    total = 0.0
    for launch, counted in zip(launches, workgroups, strict=True):
        x, y, z = launch.grid
        modelled = model(arch, x * y * z, launch.code, counted.program)
        left_out.update(dict.fromkeys(modelled.left_out))
        total += modelled.seconds
        kernel: dict[str, Any] = {"kernel": launch.kernel, "workgroups": x * y * z}
        # HIP launches are counted for more than the model needs.
        if isinstance(counted, CountedHipLaunch):
            kernel["threads"] = launch.code.waves * launch.code.wave_size
        kernel |= {name: getattr(launch, name) for name in _COMPILED}
        if isinstance(counted, CountedHipLaunch):
            kernel |= {"coalescing": counted.coalescing, "conflicts": counted.conflicts}
        kernel["modelled_us"] = round(modelled.seconds * 1e6, 3)
        kernel["bound_by"] = max(modelled.terms, key=lambda term: modelled.terms[term], default="unknown")
        kernels.append(kernel)
    figures = {
        "vgprs": max(k["vgprs"] for k in kernels),
        "spills": 0,
        "lds": max(k["lds"] for k in kernels),
        "waves_per_simd": min(k["waves_per_simd"] for k in kernels),
        "kernels": kernels,
        "left_out": list(left_out),
    }
    return RatedConfig(config, round(total * 1e6, 3), None, blemishes, figures)
