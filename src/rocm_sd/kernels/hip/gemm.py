"""The tiles of every kernel that stands on gemm.hpp, and which of a table an architecture takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from rocm_sd.arch import MatrixUnit
from rocm_sd.kernels.config import Config
from rocm_sd.kernels.hip.launch import ceil_div

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.arch import Arch

__all__ = ["WIDEST", "GemmConfig", "tiles_of"]

T = TypeVar("T")
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


def tiles_of(by_unit: Mapping[MatrixUnit, T], dot_wave64: T, arch: Arch) -> T | None:
    """Those of the matrix unit, or None where nothing is known of it.

    A matrix unit has waves of one size. Without one a wave is a grid of lanes, and those of 64 lanes divide a tile in
    other ways than those of 32: `dot_wave64` are theirs.
    """
    if arch.matrix_unit is MatrixUnit.DOT and arch.wave_size == 64:
        return dot_wave64
    return by_unit.get(arch.matrix_unit) if arch.matrix_unit else None
