from __future__ import annotations

from dataclasses import dataclass

from rocm_sd.kernels.config import Config

__all__ = ["LinearResidualConfig"]


@dataclass(frozen=True)
class LinearResidualConfig(Config):
    """A tile of block_m x block_n, in steps of block_k; `group_m` tiles that share columns of y run side by side.

    `split_k` is how many programs share a tile's K; `stages` is how many steps are loaded ahead.
    """

    block_m: int = 64
    block_n: int = 64
    block_k: int = 32
    group_m: int = 8
    split_k: int = 1
    warps: int = 4
    stages: int = 2
