"""The machine that a record was made on: card, driver and versions; nothing that names a person, a host or a folder."""

from __future__ import annotations

import platform
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from rocm_sd import __version__, arch
from rocm_sd.bench.records import Machine

__all__ = ["machine"]

PACKAGES = ("torch", "triton", "diffusers", "transformers")
# The wheel of torch for ROCm brings Triton under names of its own.
_TRITON_NAMES = ("triton", "pytorch-triton-rocm", "triton-rocm", "pytorch-triton")
_ROOT = Path("/")


def machine(device: torch.device, *, root: Path = _ROOT) -> Machine:
    """`root` is where sys/ and proc/ are."""
    facts = arch.device_facts(device)
    is_cpu = facts.arch is arch.CPU
    return Machine(
        device=(_cpu_name(root) or facts.name) if is_cpu else facts.name,
        arch=facts.arch.name,
        compute_units=facts.compute_units if facts.compute_units is not None else facts.multiprocessors,
        memory_mib=None if facts.memory_bytes is None else facts.memory_bytes // 2**20,
        driver=None if is_cpu else _driver(facts.arch.vendor, root),
        system=_system(platform.system(), platform.release()),
        versions=_versions(device),
    )


def _system(name: str, release: str) -> str:
    """Name and numbers, "Linux 6.8.0": what follows them may be anything, such as the name of who built the kernel."""
    numbers = re.match(r"\d+(\.\d+)*", release)
    # Under WSL the driver is that of Windows, and everything about it differs.
    wsl = " (WSL)" if "microsoft" in release.lower() else ""
    return f"{name} {numbers[0]}{wsl}" if numbers else f"{name}{wsl}"


def _cpu_name(root: Path) -> str | None:
    """platform.processor() says x86_64 on most distributions."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return None


def _driver(vendor: arch.Vendor, root: Path) -> str | None:
    if vendor is arch.Vendor.AMD:
        told = _read(root / "sys/module/amdgpu/version")
        if told:
            return f"amdgpu {told}"
        # Only AMD's own package has a version; that of the kernel is as old as the kernel, which `system` tells.
        return "amdgpu of the kernel" if (root / "sys/module/amdgpu").is_dir() else None
    if vendor is arch.Vendor.NVIDIA:
        # The builder's name stands in this file too: only the number is taken.
        text = _read(root / "proc/driver/nvidia/version")
        number = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", text)
        return f"nvidia {number[1]}" if number else None
    return None


def _versions(device: torch.device) -> dict[str, str]:
    found: dict[str, str | None] = {"rocm-sd": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        found[package] = _installed(*(_TRITON_NAMES if package == "triton" else (package,)))
    if device.type == "cuda":
        on_rocm = torch.version.hip is not None
        found["rocm" if on_rocm else "cuda"] = (
            getattr(torch.version, "rocm", None) or torch.version.hip if on_rocm else torch.version.cuda
        )
        number: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        found["miopen" if on_rocm else "cudnn"] = None if number is None else _dotted(number, on_rocm=on_rocm)
    return {name: value for name, value in found.items() if value is not None}


def _dotted(number: int, *, on_rocm: bool) -> str:
    """One integer as torch gives it: MIOpen 3005001 is 3.5.1, cuDNN 91002 is 9.10.2, and 8907 is 8.9.7."""
    if on_rocm and number >= 1_000_000:
        major, minor = 1_000_000, 1000
    else:
        major, minor = (1000 if number < 10_000 else 10_000), 100
    return f"{number // major}.{number % major // minor}.{number % minor}"


def _installed(*names: str) -> str | None:
    for name in names:
        with suppress(PackageNotFoundError):
            return version(name)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
