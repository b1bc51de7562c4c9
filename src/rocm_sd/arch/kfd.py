"""Which GPUs the kernel sees, read from sysfs: no torch, no ROCm, no driver library, no permission to open a device.

AMD's compute driver (KFD) lists every node under topology/nodes; a node with SIMDs is a GPU. It reports the real gfx
number whatever HSA_OVERRIDE_GFX_VERSION says, while torch reports the overridden one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocm_sd.arch.table import get
from rocm_sd.arch.types import Vendor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["KFD_NODES", "FoundGpu", "find_gpus", "gfx_name", "numbered", "read_properties"]

KFD_NODES = "sys/class/kfd/kfd/topology/nodes"
_DRM = "sys/class/drm"
_NVIDIA_PROC = "proc/driver/nvidia/gpus"
_PCI_NVIDIA = "0x10de"
_PCI_AMD = "0x1002"

# KFD memory banks: 1 is video memory the host can reach, 2 is the rest of it.
_VIDEO_HEAPS = (1, 2)

# LLVM's user guide for the AMDGPU backend lists these as processors of APUs only, beside those of the table.
_APU_ONLY = frozenset({"gfx902", "gfx909", "gfx90c", "gfx1013", "gfx1033", "gfx1035", "gfx1036", "gfx1152", "gfx1153"})


@dataclass(frozen=True, slots=True)
class FoundGpu:
    """A GPU as the kernel describes it; None is what the kernel does not say.

    `arch_name` is a gfx name on AMD. NVIDIA's compute capability needs its driver library, so it is None there.
    """

    vendor: Vendor
    name: str | None
    pci_address: str | None
    arch_name: str | None = None
    compute_units: int | None = None
    vram_bytes: int | None = None
    integrated: bool | None = None
    node: int | None = None


def find_gpus(root: Path | None = None) -> tuple[FoundGpu, ...]:
    """AMD before NVIDIA, discrete before integrated, and larger before smaller. `root` is where sys/ and proc/ are."""
    if root is None:
        from pathlib import Path  # noqa: PLC0415 - a fifth of this package's import time

        root = Path("/")
    amd = tuple(_kfd_gpus(root)) or tuple(_drm_gpus(root, _PCI_AMD, Vendor.AMD))
    nvidia = tuple(_nvidia_proc_gpus(root)) or tuple(_drm_gpus(root, _PCI_NVIDIA, Vendor.NVIDIA))
    return (*sorted(amd, key=_rank), *nvidia)


def gfx_name(target_version: int) -> str:
    """KFD's decimal major * 10000 + minor * 100 + stepping as a gfx name: 90402 -> "gfx942", 90010 -> "gfx90a"."""
    major, rest = divmod(target_version, 10000)
    minor, stepping = divmod(rest, 100)
    return f"gfx{major}{minor:x}{stepping:x}"


def _rank(gpu: FoundGpu) -> tuple[int, int, int]:
    kind = {False: 0, None: 1, True: 2}[gpu.integrated]
    return kind, -(gpu.compute_units or 0), gpu.node or 0


def _kfd_gpus(root: Path) -> Iterator[FoundGpu]:
    for folder in numbered(root / KFD_NODES):
        try:
            properties = read_properties(folder / "properties")
            if not properties.get("simd_count"):
                continue
            yield _kfd_gpu(folder, properties)
        except (OSError, ValueError, KeyError) as error:
            # One unreadable node (the kernel hides nodes a container may not use) must not hide the others.
            _warn(folder / "properties", error)


def _warn(path: Path, error: Exception) -> None:
    import logging  # noqa: PLC0415 - rarely needed, and slower to import than this module

    logging.getLogger(__name__).warning("%s is skipped: %s: %s", path, type(error).__name__, error)


def _kfd_gpu(folder: Path, properties: dict[str, int]) -> FoundGpu:
    gfx = gfx_name(properties["gfx_target_version"])
    simd_per_cu = properties.get("simd_per_cu", 0)
    location = properties.get("location_id")
    return FoundGpu(
        vendor=Vendor.AMD,
        arch_name=gfx,
        name=_read_text(folder / "name") or None,
        compute_units=properties["simd_count"] // simd_per_cu if simd_per_cu else None,
        vram_bytes=_video_memory(folder / "mem_banks"),
        integrated=_is_integrated(gfx, properties),
        pci_address=None if location is None else _pci_address(properties.get("domain", 0), location),
        node=int(folder.name),
    )


def _is_integrated(gfx: str, properties: dict[str, int]) -> bool | None:
    if properties.get("cpu_cores_count"):
        return True
    return True if gfx in _APU_ONLY else get(gfx).integrated


def _video_memory(banks: Path) -> int | None:
    sizes = [
        bank["size_in_bytes"]
        for bank in (read_properties(folder / "properties") for folder in numbered(banks))
        if bank.get("heap_type") in _VIDEO_HEAPS
    ]
    return sum(sizes) if sizes else None


def _pci_address(domain: int, location: int) -> str:
    """KFD packs bus, device and function into 16 bits: 768 -> "0000:03:00.0"."""
    return f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 0x7}"


def _nvidia_proc_gpus(root: Path) -> Iterator[FoundGpu]:
    folder = root / _NVIDIA_PROC
    if not folder.is_dir():
        return
    for gpu in sorted(folder.iterdir()):
        lines = (_read_text(gpu / "information") or "").splitlines()
        fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        yield FoundGpu(Vendor.NVIDIA, fields.get("Model"), gpu.name)


def _drm_gpus(root: Path, pci_vendor: str, vendor: Vendor) -> Iterator[FoundGpu]:
    """What is on the bus when the vendor's own driver says nothing: presence, and no more."""
    folder = root / _DRM
    if not folder.is_dir():
        return
    for card in sorted(folder.glob("card[0-9]*")):
        if "-" not in card.name and _read_text(card / "device" / "vendor") == pci_vendor:
            yield FoundGpu(vendor, None, (card / "device").resolve().name)


def numbered(folder: Path) -> list[Path]:
    """Sub-folders 0, 1, ... 10 in the order of their numbers."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))


def read_properties(path: Path) -> dict[str, int]:
    properties = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(" ")
        properties[key] = int(value)
    return properties


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
