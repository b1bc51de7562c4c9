"""The machine as the kernel lists it, where torch cannot open its GPU without an end of the process."""

from __future__ import annotations

import platform
from pathlib import Path

from rocm_sd import arch
from rocm_sd.arch import host
from rocm_sd.bench.records import Machine

__all__ = ["machine"]

_PACKAGES = ("rocm-sd", "torch", "diffusers", "transformers")


def machine() -> Machine:
    found = next(iter(arch.find_gpus()), None)
    name = (found.arch_name if found else None) or "cpu"
    vendor = found.vendor if found else arch.Vendor.NONE
    driver = host.driver(vendor, Path("/"))
    versions = {each: version for each in _PACKAGES if (version := host.installed(each)) is not None}
    return Machine(
        (found.name if found else None) or name, name, found.compute_units if found else None,
        None if found is None or found.vram_bytes is None else found.vram_bytes // 2**20, driver,
        host.system_name(platform.system(), platform.release()), {"python": platform.python_version(), **versions},
    )  # fmt: skip
