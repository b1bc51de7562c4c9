from __future__ import annotations

from dataclasses import dataclass

from rocm_sd.kernels.config import Config

__all__ = ["LayerNorm8bitConfig"]


@dataclass(frozen=True)
class LayerNorm8bitConfig(Config):
    """`rows` and `warps` of one program, and the width in which a row is taken, a power of two."""

    rows: int = 4
    warps: int = 4
    chunk: int = 256
