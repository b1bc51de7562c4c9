"""What stands around a GPU: the system, the driver, the packages, and what torch's build says of itself.

Nothing here names a person, a host or a folder. torch is handed in: importing this needs none.
"""

from __future__ import annotations

import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from rocm_sd.arch.types import Vendor
from rocm_sd.files import read_text

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "TRITON_PACKAGES", "UNVERSIONED", "convolution_library", "driver", "installed", "pci_address", "runtime",
    "system_name", "version_digits",
]  # fmt: skip

# The wheel of torch for ROCm asks for Triton under names of its own. All of them install a folder named triton.
TRITON_PACKAGES = ("triton", "pytorch-triton-rocm", "triton-rocm", "pytorch-triton", "triton-windows")
# Only AMD's own package of the driver has a version; one that came with the kernel is as old as the kernel.
UNVERSIONED = "amdgpu"


def installed(*names: str) -> str | None:
    """The version of the first of these packages that is there."""
    for name in names:
        with suppress(PackageNotFoundError):
            return version(name)
    return None


def version_digits(text: str) -> str | None:
    found = re.match(r"\d+(\.\d+)*", text)
    return found[0] if found else None


def system_name(name: str, release: str) -> str:
    """Name and numbers, "Linux 6.8.0": what follows them may be anything, such as the name of who built the kernel."""
    # Under WSL the driver is that of Windows, and everything about it differs.
    wsl = " (WSL)" if "microsoft" in release.lower() else ""
    return f"{name} {version_digits(release) or ''}".strip() + wsl


def driver(vendor: Vendor, root: Path) -> str | None:
    """Read the driver's version under sys/ and proc/ of `root`: "nvidia 580.82.07", or `UNVERSIONED`."""
    if vendor is Vendor.AMD:
        version_ = read_text(root / "sys/module/amdgpu/version")
        return f"amdgpu {version_}" if version_ else UNVERSIONED if (root / "sys/module/amdgpu").is_dir() else None
    if vendor is Vendor.NVIDIA:
        # The builder's name stands in this file too: only the number is taken.
        text = read_text(root / "proc/driver/nvidia/version")
        number = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", text)
        return f"nvidia {number[1]}" if number else None
    return None


def runtime(torch: Any) -> tuple[str, str | None]:
    """What torch was built for: ("rocm", "7.1.0") or ("cuda", "13.0")."""
    if torch.version.hip is None:
        return "cuda", torch.version.cuda
    # The version of ROCm itself; that of HIP, which every ROCm build has, counts in another way.
    return "rocm", getattr(torch.version, "rocm", None) or torch.version.hip


def convolution_library(number: int, *, on_rocm: bool) -> str:
    """One integer as torch gives it: MIOpen 3005001 is 3.5.1, cuDNN 91002 is 9.10.2, and 8907 is 8.9.7."""
    if on_rocm and number >= 1_000_000:
        major, minor = 1_000_000, 1000
    else:
        major, minor = (1000 if number < 10_000 else 10_000), 100
    return f"{number // major}.{number % major // minor}.{number % minor}"


def pci_address(properties: Any) -> str:
    """Make the address from torch's properties of a device, which lack its function (.0, .1)."""
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
