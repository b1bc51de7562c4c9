"""Which architecture a device is. torch is imported inside the functions: set-up runs this before torch is there.

Under HSA_OVERRIDE_GFX_VERSION torch reports the overridden gfx, and that is what `detect` returns, since kernels are
built for it; `find_gpus` reports the real one.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rocm_sd.arch.kfd import find_gpus
from rocm_sd.arch.table import CPU, get, unknown
from rocm_sd.arch.types import Arch, Vendor
from rocm_sd.errors import DeviceUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "DeviceFacts", "arch_from_properties", "computes_on_gpu", "detect", "device_facts", "emulated", "emulating",
]  # fmt: skip

# The card that CPU tensors are taken to be on, while machine code for it is emulated.
_emulated: Arch | None = None


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The card at hand, where `arch` describes a named product of its kind.

    `multiprocessors` is the runtime's own count. ROCm counts WGPs on RDNA (32 on an RX 9070 XT), so `compute_units` is
    that times `arch.cus_per_wgp`; both are the number of cores on a CPU.
    """

    name: str
    arch: Arch
    compute_units: int | None
    multiprocessors: int | None
    memory_bytes: int | None


@contextmanager
def emulating(arch: Arch) -> Iterator[None]:
    """Within, in all threads, the CPU is taken for the product that the architecture describes (verify/device.py)."""
    global _emulated  # noqa: PLW0603 -- one for the process: a pipeline's threads share its card
    before, _emulated = _emulated, arch
    try:
        yield
    finally:
        _emulated = before


def emulated() -> Arch | None:
    """What the CPU is taken for; None where it is itself."""
    return _emulated


def computes_on_gpu(device: Any) -> bool:
    """Whether kernels for a GPU compute what lies on this torch.device: a GPU's own, or a CPU that is taken for one."""
    return bool(device.type != "cpu") or _emulated is not None


def detect(device: object = None) -> Arch:
    """The architecture of `device` ("cuda:1", torch.device, "cpu"); None means torch's current GPU, or else the CPU."""
    if _emulated is not None and (device is None or str(device).startswith("cpu")):
        return _emulated
    torch = _torch()
    if torch is None:
        return _detect_without_torch(device)
    kind, index = _resolve(torch, device)
    if kind == "cpu":
        return CPU
    return _detect_gpu(index) if kind == "cuda" else unknown(kind)


def device_facts(device: object = None) -> DeviceFacts:
    # Every norm and every attention asks, with the device of its tensor: torch's own answers take longer than a launch.
    if getattr(device, "type", None) == "cuda" and getattr(device, "index", None) is not None:
        return _known_facts(device)
    return _facts(device)


def _facts(device: object) -> DeviceFacts:
    torch = _torch()
    arch = detect(device)
    if arch is _emulated:
        return DeviceFacts(arch.product or arch.name, arch, arch.compute_units, multiprocessors=None, memory_bytes=None)
    if arch is CPU or torch is None:
        return _host_facts(arch)
    kind, index = _resolve(torch, device)
    if kind != "cuda":
        return DeviceFacts(kind, arch, compute_units=None, multiprocessors=None, memory_bytes=None)
    properties = torch.cuda.get_device_properties(index)
    count = int(properties.multi_processor_count)
    return DeviceFacts(
        name=str(properties.name),
        arch=arch,
        compute_units=None if arch.cus_per_wgp is None else count * arch.cus_per_wgp,
        multiprocessors=count,
        memory_bytes=int(properties.total_memory),
    )


def arch_from_properties(*, gcn_arch_name: str | None = None, capability: tuple[int, int] | None = None) -> Arch:
    """Give the gfx name on ROCm, the compute capability on CUDA, never both.

    ROCm fills in a capability too: gfx1100 reports (11, 0), which on CUDA is another chip altogether.
    """
    if (gcn_arch_name is None) == (capability is None):
        raise ValueError("give gcn_arch_name on ROCm or capability on CUDA, and only one of them")
    if capability is not None:
        major, minor = capability
        return get(f"sm_{major}{minor}")
    return get(str(gcn_arch_name))


_known_facts = cache(_facts)


@cache
def _detect_gpu(index: int) -> Arch:
    torch = import_module("torch")
    if torch.version.hip is not None:
        return arch_from_properties(gcn_arch_name=torch.cuda.get_device_properties(index).gcnArchName)
    return arch_from_properties(capability=torch.cuda.get_device_capability(index))


def _resolve(torch: Any, device: object) -> tuple[str, int]:
    available = torch.cuda.is_available()
    if device is None:
        return ("cuda", torch.cuda.current_device()) if available else ("cpu", 0)
    asked = torch.device(device)
    if asked.type != "cuda":
        return asked.type, asked.index or 0
    if not available:
        raise DeviceUnavailable(
            f"{asked} was asked for, but torch {torch.__version__} sees no GPU.",
            hint="Use device='cpu', or install the torch that fits your GPU; type: rocm-sd info",
        )
    index = torch.cuda.current_device() if asked.index is None else asked.index
    if index >= torch.cuda.device_count():
        raise DeviceUnavailable(
            f"{asked} was asked for, but torch sees {torch.cuda.device_count()} GPU(s), counted from 0.",
            hint="Name one of those, or check HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES.",
        )
    return "cuda", index


def _detect_without_torch(device: object) -> Arch:
    if device is None:
        found = find_gpus()
        if not found:
            return CPU
        name = found[0].arch_name
        return get(name) if name is not None else unknown("nvidia" if found[0].vendor is Vendor.NVIDIA else "gfx")
    if str(device) == "cpu":
        return CPU
    raise DeviceUnavailable(
        f"{device} was asked for, but torch is not installed, so devices have no numbers yet.",
        hint="Install the torch that fits your GPU, or call detect() with no device.",
    )


def _host_facts(arch: Arch) -> DeviceFacts:
    if arch is not CPU:
        gpu = find_gpus()[0]
        return DeviceFacts(gpu.name or arch.name, arch, gpu.compute_units, None, gpu.vram_bytes)
    import platform  # noqa: PLC0415 - needed for the CPU's name alone

    cores = os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    return DeviceFacts(platform.processor() or platform.machine(), arch, cores, cores, memory)


def _torch() -> Any | None:
    try:
        return import_module("torch")
    except ModuleNotFoundError as error:
        # A torch that is there but misses one of its own parts must say so, and not pass for absent.
        if error.name != "torch":
            raise
        return None
