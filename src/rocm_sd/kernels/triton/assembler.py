"""What the assembler behind Triton gets wrong, so that a launcher can take code that it gets right.

ptxas 12.8.93, which Triton 3.6 brings, takes a stale register for the shared-memory descriptor of a wgmma that follows
a loop: where a head is in several pieces and a block of keys is left for after the loop, the last piece's product with
the values reads keys 16 and up from elsewhere. Wrong were two pieces with 64 and 128 keys in a block, and three with
32, too. See benchmarks/ptxas-h200/README.md.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

from rocm_sd import arch

if TYPE_CHECKING:
    import torch

    from rocm_sd.kernels.configs.attention import AttentionConfig

__all__ = ["loses_last_block", "ptxas_version"]

# 12.9.86 and 13.0.88 are right on the same calls.
_RIGHT_FROM = (12, 9)
# Of fewer queries, or in fewer warps than a warpgroup has, Triton takes mma and not wgmma.
_WGMMA_QUERIES = 64
_WARPGROUP = 4


def loses_last_block(device: torch.device, config: AttentionConfig) -> bool:
    """Whether what comes after the loop over keys may be wrong where a head is in several pieces."""
    return config.block_m >= _WGMMA_QUERIES and config.warps >= _WARPGROUP and _is_affected(device)


@cache
def _is_affected(device: torch.device) -> bool:
    if not arch.detect(device).has_wgmma:
        return False
    version = ptxas_version()
    # One that does not say its version is not known to be right.
    return version is None or version < _RIGHT_FROM


def ptxas_version() -> tuple[int, ...] | None:
    """Of what Triton assembles with for sm_90, TRITON_PTXAS_PATH included; None where nobody can tell."""
    try:
        from triton.backends.nvidia.compiler import get_ptxas_version  # noqa: PLC0415 -- ROCm's Triton may have none

        said = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", get_ptxas_version(90))
    except Exception:  # noqa: BLE001 -- no such function, no such file, or one that does not run
        return None
    return None if said is None else tuple(map(int, said.groups()))
