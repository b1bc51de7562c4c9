from __future__ import annotations

from dataclasses import dataclass

from rocm_sd.kernels.config import Config

__all__ = ["GuidedStepConfig"]


@dataclass(frozen=True)
class GuidedStepConfig(Config):
    """`block`: values of one item a program."""

    block: int = 512
    warps: int = 2
