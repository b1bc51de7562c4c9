from __future__ import annotations

from dataclasses import dataclass

from rocm_sd.kernels.config import Config

__all__ = ["LinearGegluConfig"]


@dataclass(frozen=True)
class LinearGegluConfig(Config):
    """A tile of block_m x block_n outputs, twice as many sums, in steps of block_k.

    `group_m` tiles that share columns of y run side by side; `stages` is how many steps are loaded ahead.
    """

    block_m: int = 64
    block_n: int = 64
    block_k: int = 32
    group_m: int = 8
    warps: int = 4
    stages: int = 2
