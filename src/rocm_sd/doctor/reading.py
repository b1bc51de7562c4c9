"""The facts of the machine at hand: sysfs for its GPUs, package metadata for versions, a process for torch."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sysconfig
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocm_sd import arch, settings
from rocm_sd.arch import host
from rocm_sd.doctor.check import CannotRun
from rocm_sd.doctor.facts import WATCHED, Facts, Gpu, TorchFacts
from rocm_sd.doctor.probes import answer_of
from rocm_sd.files import read_text
from rocm_sd.typed_json import read

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["PACKAGES", "cards", "gather", "gpus_in"]

PACKAGES = (
    "accelerate",
    "aiter",
    "diffusers",
    "flash-attn",
    "rocm-sd",
    "sageattention",
    "safetensors",
    "torch",
    "torchao",
    "torchvision",
    "transformers",
    "xformers",
    *host.TRITON_PACKAGES,
)

_DRM = "sys/class/drm"
# Importing torch takes seconds, opening a sick driver minutes.
_PATIENCE_S = 120.0


def gather(root: Path | None = None, environment: Mapping[str, str] | None = None) -> Facts:
    """The machine at hand. `root` is where sys/, proc/ and opt/ are, `environment` what its variables are."""
    root = root or Path("/")
    given = os.environ if environment is None else environment
    answer = _ask_torch(_PATIENCE_S)
    torch = _torch_facts(answer)
    return Facts(
        system=host.system_name(platform.system(), platform.release()),
        python=platform.python_version(),
        kernel=host.version_digits(platform.release()) if platform.system() == "Linux" else None,
        rocm=answer.get("rocm") or _rocm_version(root) or _rocm_of(torch.version),
        miopen=answer.get("miopen"),
        memory_total=_memory(root),
        gpus=gpus_in(root),
        torch=torch,
        packages=_packages(),
        environment={name: given[name] for name in WATCHED if name in given},
        c_compiler=_c_compiler(given),
        python_header=(Path(sysconfig.get_path("include", _scheme())) / "Python.h").is_file(),
    )


def gpus_in(root: Path) -> tuple[Gpu, ...]:
    """List the GPUs in the order of the kernel's nodes, which is the order that HIP_VISIBLE_DEVICES counts in."""
    memory = {address: _sizes(device) for device, address in cards(root)}
    found = sorted(arch.find_gpus(root), key=lambda gpu: (gpu.vendor.value, -1 if gpu.node is None else gpu.node))
    gpus: list[Gpu] = []
    for gpu in found:
        sizes = memory.get(gpu.pci_address or "", {})
        total, used = sizes.get("vram_total", gpu.vram_bytes), sizes.get("vram_used")
        gpus.append(
            Gpu(
                # Each vendor's runtime counts its own.
                index=sum(other.vendor == gpu.vendor.value for other in gpus),
                vendor=gpu.vendor.value,
                name=gpu.name,
                gfx=gpu.arch_name,
                integrated=gpu.integrated,
                compute_units=gpu.compute_units,
                vram_total=total,
                vram_free=None if total is None or used is None else total - used,
                gtt_total=sizes.get("gtt_total"),
                pci_address=gpu.pci_address,
            )
        )
    return tuple(gpus)


def cards(root: Path) -> Iterator[tuple[Path, str]]:
    """The device folder of each card with its PCI address, which a copy has in its uevent and not as a link."""
    for card in sorted((root / _DRM).glob("card[0-9]*")):
        device = card / "device"
        if "-" not in card.name and device.is_dir():
            slot = re.search(r"^PCI_SLOT_NAME=(\S+)$", read_text(device / "uevent"), re.MULTILINE)
            yield device, slot[1] if slot else device.resolve().name


def _sizes(device: Path) -> dict[str, int]:
    """amdgpu has the sizes of its memories in a card's folder: video memory, and what it may take of the system's."""
    sizes = {name: read_text(device / f"mem_info_{name}") for name in ("vram_total", "vram_used", "gtt_total")}
    return {name: int(text) for name, text in sizes.items() if text.isdecimal()}


def _ask_torch(patience: float) -> dict[str, Any]:
    try:
        return answer_of("torch", ["rocm_sd.doctor.torch_facts"], patience)
    except CannotRun as reason:
        return {"error": str(reason)}


def _torch_facts(answer: Mapping[str, Any]) -> TorchFacts:
    known = {each.name for each in fields(TorchFacts)}
    facts = read(TorchFacts, {name: value for name, value in answer.items() if name in known})
    # A torch that crashes is installed all the same: its package tells the version.
    return replace(facts, version=_packages().get("torch")) if facts.error else facts


def _packages() -> dict[str, str]:
    return {name: found for name in sorted(PACKAGES) if (found := host.installed(name)) is not None}


def _rocm_version(root: Path) -> str | None:
    folder = settings.current().rocm_path if root == Path("/") else None
    return host.version_digits(read_text((folder or root / "opt/rocm") / ".info/version"))


def _rocm_of(torch_version: str | None) -> str | None:
    """The ROCm inside a wheel: "2.9.1+rocm7.1" was built with 7.1."""
    found = re.search(r"\+rocm(\d+(?:\.\d+)*)", torch_version or "")
    return found[1] if found else None


def _c_compiler(environment: Mapping[str, str]) -> str:
    """The name of the compiler that Triton would take, in the order in which it looks; "" where there is none."""
    named = environment.get("CC")
    path = environment.get("PATH")
    wanted = (named,) if named is not None else ("gcc", "clang")
    found = next(filter(None, (shutil.which(name, path=path) for name in wanted)), None)
    return Path(found).name if found else ""


def _scheme() -> str:
    """Where Triton looks for headers: of Debian's own scheme it takes the usual one."""
    scheme = sysconfig.get_default_scheme()
    return "posix_prefix" if scheme == "posix_local" else scheme


def _memory(root: Path) -> int | None:
    found = re.search(r"^MemTotal:\s+(\d+) kB$", read_text(root / "proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None
