"""What every kernel that stands on gemm.hpp is told of its tiles."""

from __future__ import annotations

from dataclasses import dataclass

from rocm_sd.kernels.config import Config
from rocm_sd.kernels.hip.launch import ceil_div

__all__ = ["WIDEST", "GemmConfig"]

WIDEST = 8  # values of 16 bits in 16 bytes


@dataclass(frozen=True)
class GemmConfig(Config):
    """A tile of block_m x block_n in steps of block_k, computed by waves_m x waves_n waves in fragments of one size.

    `stages` is how many steps stand in LDS; `group_m` tiles that share columns of y run side by side.
    """

    block_m: int
    block_n: int
    block_k: int
    waves_m: int
    waves_n: int
    stages: int
    fragment: int
    group_m: int = 8

    @property
    def parameters(self) -> tuple[tuple[str, int | str], ...]:
        """Those that the code is compiled with."""
        names = ("block_m", "block_n", "block_k", "waves_m", "waves_n", "stages", "fragment")
        return tuple((name, getattr(self, name)) for name in names)

    def tiles(self, m: int, n: int) -> int:
        return ceil_div(m, self.block_m) * ceil_div(n, self.block_n)
