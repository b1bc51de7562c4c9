"""The machine that a record was made on: card, driver and versions; nothing that names a person, a host or a folder."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from rocm_sd import __version__, arch
from rocm_sd.arch import host
from rocm_sd.bench.records import Machine
from rocm_sd.files import read_text

__all__ = ["machine"]

PACKAGES = ("torch", "triton", "diffusers", "transformers")
_ROOT = Path("/")


def machine(device: torch.device, *, root: Path = _ROOT) -> Machine:
    """`root` is where sys/ and proc/ are."""
    facts = arch.device_facts(device)
    is_cpu = facts.arch is arch.CPU
    driver = host.driver(facts.arch.vendor, root)
    return Machine(
        device=(_cpu_name(root) or facts.name) if is_cpu else facts.name,
        arch=facts.arch.name,
        compute_units=facts.compute_units if facts.compute_units is not None else facts.multiprocessors,
        memory_mib=None if facts.memory_bytes is None else facts.memory_bytes // 2**20,
        driver=f"{driver} of the kernel" if driver == host.UNVERSIONED else driver,
        system=host.system_name(platform.system(), platform.release()),
        versions=_versions(device),
    )


def _cpu_name(root: Path) -> str | None:
    """platform.processor() says x86_64 on most distributions."""
    for line in read_text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return None


def _versions(device: torch.device) -> dict[str, str]:
    found: dict[str, str | None] = {"rocm-sd": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        found[package] = host.installed(*(host.TRITON_PACKAGES if package == "triton" else (package,)))
    if device.type == "cuda":
        name, runtime = host.runtime(torch)
        found[name] = runtime
        number: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        on_rocm = name == "rocm"
        library = None if number is None else host.convolution_library(number, on_rocm=on_rocm)
        found["miopen" if on_rocm else "cudnn"] = library
    return {name: value for name, value in found.items() if value is not None}
