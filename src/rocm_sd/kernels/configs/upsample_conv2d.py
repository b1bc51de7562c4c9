from __future__ import annotations

from dataclasses import dataclass

from rocm_sd.kernels.config import Config

__all__ = ["UpsampleConv2dConfig"]


@dataclass(frozen=True)
class UpsampleConv2dConfig(Config):
    """Tile sizes, as those of conv2d: a tile has block_n + block_n2 channels, and block_n2 may be 0."""

    block_m: int = 64
    block_n: int = 64
    block_n2: int = 0
    block_k: int = 32
    group_m: int = 8
    warps: int = 4
    stages: int = 2
