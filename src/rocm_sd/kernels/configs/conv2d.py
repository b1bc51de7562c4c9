from __future__ import annotations

from dataclasses import dataclass

from rocm_sd.kernels.config import Config

__all__ = ["Conv2dConfig"]


@dataclass(frozen=True)
class Conv2dConfig(Config):
    """Tile sizes; `group_m` tiles of pixels take turns at the same weights, which then stay in the L2 cache.

    A tile has block_n + block_n2 channels: 320, 640 and 1280 are whole multiples of 128 + 32 and of no power of two
    above 64. block_n2 may be 0.
    """

    block_m: int = 64
    block_n: int = 64
    block_n2: int = 0
    block_k: int = 32
    group_m: int = 8
    split_k: int = 1
    warps: int = 4
    stages: int = 2

    def reads_two(self, kernel: int) -> bool:
        """Whether the kernel takes input channels in two tensors."""
        return kernel == 1 and self.split_k == 1
