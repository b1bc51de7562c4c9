from __future__ import annotations

from dataclasses import dataclass

from rocm_sd.kernels.config import Config

__all__ = ["GegluConfig"]


@dataclass(frozen=True)
class GegluConfig(Config):
    """A tile of `rows` x `block_f` outputs for `warps`."""

    block_f: int = 256
    rows: int = 4
    warps: int = 4
