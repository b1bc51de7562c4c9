"""Every architecture that is known, by name. An unknown one inherits nothing: it is served by stock torch."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from rocm_sd.arch.table_amd import AMD
from rocm_sd.arch.table_nvidia import NVIDIA
from rocm_sd.arch.types import Arch, Fp8, MatrixUnit, Vendor

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ARCHS", "CPU", "get", "unknown"]

CPU = Arch(
    name="cpu",
    family="cpu",
    vendor=Vendor.NONE,
    known=True,
    matrix_unit=MatrixUnit.NONE,
    fp8=Fp8.NONE,
    triton_supported=False,
    sources=tuple((field, "by definition: no GPU is used") for field in ("matrix_unit", "fp8", "triton_supported")),
)

ARCHS: Mapping[str, Arch] = MappingProxyType({arch.name: arch for arch in (*AMD, *NVIDIA, CPU)})


def normalise(name: str) -> str:
    """gfx942:sramecc+:xnack- is gfx942, amdgcn-amd-amdhsa--gfx90a is gfx90a, sm_90a is sm_90."""
    short = name.strip().lower().split(":", 1)[0].rsplit("--", 1)[-1]
    # The letter names a compile target with instructions of that chip alone; the chip is the same.
    return short[:-1] if short.startswith("sm_") and short[-1:] in {"a", "f"} else short


def get(name: str) -> Arch:
    """The table's entry for a gfx or sm name, or an `unknown` value that carries the name and no figure."""
    short = normalise(name)
    found = ARCHS.get(short)
    return unknown(short) if found is None else found


def unknown(name: str) -> Arch:
    """A value with no figures. Only the vendor is read off the name."""
    short = normalise(name)
    return Arch(name=short, family="unknown", vendor=Vendor.of(short), known=False)
