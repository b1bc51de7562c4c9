from __future__ import annotations

from dataclasses import dataclass

from rocm_sd.kernels.config import Config

__all__ = ["Conv2d8bitConfig"]


@dataclass(frozen=True)
class Conv2d8bitConfig(Config):
    """A tile of block_m pixels by block_n + block_n2 channels, in steps of block_k input channels of one tap; the rest
    is as for `Conv2dConfig`.
    """

    block_m: int = 64
    block_n: int = 64
    block_n2: int = 0
    block_k: int = 64
    group_m: int = 8
    warps: int = 4
    stages: int = 2
