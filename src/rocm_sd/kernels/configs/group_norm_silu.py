from __future__ import annotations

from dataclasses import dataclass

from rocm_sd.kernels.config import Config
from rocm_sd.kernels.sizes import power_of_2

__all__ = ["GroupNormSiluConfig"]


@dataclass(frozen=True)
class GroupNormSiluConfig(Config):
    """Tile sizes; `slices_per_cu` is how many `_moments` programs are wanted for each compute unit.

    A group of at most `whole_elements`, rows and channels rounded up to powers of two, is left to `_whole`.
    """

    whole_elements: int = 4096
    whole_warps: int = 4
    moments_channels: int = 64
    moments_rows: int = 16
    moments_warps: int = 4
    slices_per_cu: int = 4
    apply_channels: int = 64
    apply_rows: int = 16
    apply_warps: int = 4

    def one_pass(self, HW: int, width: int) -> bool:
        """Whether a group of `width` channels fits one workgroup's registers."""
        return power_of_2(HW) * power_of_2(width) <= self.whole_elements
