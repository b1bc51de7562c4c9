"""Which tiles of a table an architecture takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from rocm_sd.arch import MatrixUnit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.arch import Arch

__all__ = ["tiles_of"]

T = TypeVar("T")


def tiles_of(by_unit: Mapping[MatrixUnit, T], dot_wave64: T, arch: Arch) -> T | None:
    """Those of the matrix unit, or None where nothing is known of it.

    A matrix unit has waves of one size. Without one a wave is a grid of lanes, and those of 64 lanes divide a tile in
    other ways than those of 32: `dot_wave64` are theirs.
    """
    if arch.matrix_unit is MatrixUnit.DOT and arch.wave_size == 64:
        return dot_wave64
    return by_unit.get(arch.matrix_unit) if arch.matrix_unit else None
