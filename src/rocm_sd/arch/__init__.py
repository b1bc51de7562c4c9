"""What a GPU is: the table of architectures, which one is at hand, and what fits on it. Importing this needs no torch.

>>> from rocm_sd import arch
>>> here = arch.detect()                                       # Arch of the current GPU, or of the CPU
>>> arch.get("gfx942:sramecc+:xnack-").matrix_unit
<MatrixUnit.MFMA: 'mfma'>
>>> arch.occupancy(arch.get("gfx1100"), vgprs=96, lds=0, waves_per_workgroup=4).waves_per_simd
16
"""

from __future__ import annotations

from rocm_sd.arch.detect import (
    DeviceFacts,
    arch_from_properties,
    computes_on_gpu,
    detect,
    device_facts,
    emulated,
    emulating,
)
from rocm_sd.arch.generations import generation
from rocm_sd.arch.kfd import FoundGpu, find_gpus
from rocm_sd.arch.occupancy import Occupancy, occupancy
from rocm_sd.arch.roofline import Roofline, roofline
from rocm_sd.arch.table import ARCHS, CPU, get, unknown
from rocm_sd.arch.types import Arch, Fp8, MatrixUnit, Vendor

__all__ = [
    "ARCHS",
    "CPU",
    "Arch",
    "DeviceFacts",
    "FoundGpu",
    "Fp8",
    "MatrixUnit",
    "Occupancy",
    "Roofline",
    "Vendor",
    "arch_from_properties",
    "computes_on_gpu",
    "detect",
    "device_facts",
    "emulated",
    "emulating",
    "find_gpus",
    "generation",
    "get",
    "occupancy",
    "roofline",
    "unknown",
]
