from __future__ import annotations

from dataclasses import dataclass

from rocm_sd.kernels.config import Config

__all__ = ["Geglu8bitConfig"]


@dataclass(frozen=True)
class Geglu8bitConfig(Config):
    """`rows` and `warps` of one program, and the width in which a row is taken, a power of two."""

    rows: int = 1
    warps: int = 8
    chunk: int = 1024
