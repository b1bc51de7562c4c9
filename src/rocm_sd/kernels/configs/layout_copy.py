from __future__ import annotations

from dataclasses import dataclass

from rocm_sd.kernels.config import Config

__all__ = ["LayoutCopyConfig"]


@dataclass(frozen=True)
class LayoutCopyConfig(Config):
    """Tile: `block_c` channels of `block_hw` pixels; with fewer channels than that, as many more pixels."""

    block_c: int = 64
    block_hw: int = 64
    warps: int = 4
