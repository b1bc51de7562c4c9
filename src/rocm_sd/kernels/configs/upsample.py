from __future__ import annotations

from dataclasses import dataclass

from rocm_sd.kernels.config import Config

__all__ = ["UpsampleConfig"]


@dataclass(frozen=True)
class UpsampleConfig(Config):
    """Tile: `block_c` channels of `rows` input pixels."""

    rows: int = 16
    block_c: int = 64
    warps: int = 4
