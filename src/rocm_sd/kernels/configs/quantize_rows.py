from __future__ import annotations

from dataclasses import dataclass

from rocm_sd.kernels.config import Config

__all__ = ["QuantizeRowsConfig"]


@dataclass(frozen=True)
class QuantizeRowsConfig(Config):
    """A program has one row, for `warps`."""

    warps: int = 4
