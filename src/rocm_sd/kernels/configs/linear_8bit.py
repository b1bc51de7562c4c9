from __future__ import annotations

from dataclasses import dataclass

from rocm_sd.kernels.config import Config

__all__ = ["LONGEST_QUICK_SUM", "Linear8bitConfig"]

# Tensor cores of sm_90 sum products of fp8 with 14 bits: of 5120 of them the largest error was 1.3 times what the gate
# allows, of 1280 it was 1.05 times, of 640 it was within it. Longer sums go through float32 registers.
LONGEST_QUICK_SUM = 1024


@dataclass(frozen=True)
class Linear8bitConfig(Config):
    """A tile of block_m rows by block_n + block_n2 columns, in steps of block_k; 640 and 1280 columns are multiples
    of 128 + 32, and block_n2 may be 0. `group_m` tiles that share columns of y run side by side.

    `stages` is how many steps are loaded ahead.
    """

    block_m: int = 64
    block_n: int = 64
    block_n2: int = 0
    block_k: int = 64
    group_m: int = 8
    warps: int = 4
    stages: int = 2
