"""The torch that fits a gfx, as a line for pip: the table that set-up chooses by (tools/torch_build.py), for the user.

A test compares the two. Nothing here was tried on AMD hardware by this project: INSTALL.md has the sources.
"""

from __future__ import annotations

import sys

__all__ = ["REFUSED", "pip_line"]

TORCH_VERSION = "2.13.0"
AMD_INDEX = "https://stable.repo.amd.com/rocm/whl-next"
PYTORCH_INDEX = "https://download.pytorch.org/whl/rocm7.2"
AMD_OLDEST_PYTHON = (3, 11)

# Each of AMD's wheels holds one GPU's kernels; PyTorch's hold those of the second list.
AMD_SERVES = frozenset({
    "gfx908", "gfx90a", "gfx942", "gfx950", "gfx1010", "gfx1011", "gfx1012", "gfx1030", "gfx1031", "gfx1032", "gfx1034",
    "gfx1035", "gfx1036", "gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153",
    "gfx1200", "gfx1201",
})  # fmt: skip
PYTORCH_SERVES = frozenset({
    "gfx908", "gfx90a", "gfx942", "gfx950", "gfx1030", "gfx1100", "gfx1101", "gfx1102", "gfx1200", "gfx1201",
})  # fmt: skip
# Wheels exist, and are worse than the CPU.
REFUSED = {
    "gfx906": "ROCm dropped its matrix kernels for gfx906 in 6.4 (ROCm/ROCm#4625)",
    "gfx1033": "gradients came out wrong on gfx1033 with every ROCm build that was tried (unslothai/unsloth#8412)",
}


def pip_line(gfxs: tuple[str, ...], python: tuple[int, ...] | None = None) -> str | None:
    """What to type for one torch that serves all of these GPUs; None where no index is known to have one."""
    if python is None:
        python = sys.version_info[:2]
    served = tuple(gfx for gfx in dict.fromkeys(gfxs) if gfx not in REFUSED)
    if not served:
        return None
    if python[:2] >= AMD_OLDEST_PYTHON and all(gfx in AMD_SERVES for gfx in served):
        extras = ",".join(f"device-{gfx}" for gfx in served)
        return f'pip install --index-url {AMD_INDEX} "torch[{extras}]=={TORCH_VERSION}+rocm10.0.0"'
    if all(gfx in PYTORCH_SERVES for gfx in served):
        return f'pip install --index-url {PYTORCH_INDEX} "torch=={TORCH_VERSION}+rocm7.2"'
    return None
