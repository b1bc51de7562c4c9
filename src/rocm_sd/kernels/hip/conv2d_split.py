"""conv2d whose depth is cut into parts: their sums go to memory as float32, and are added up in their order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rocm_sd.kernels.hip.conv2d_finish import launch as finish
from rocm_sd.kernels.hip.launch import Kernel

if TYPE_CHECKING:
    from rocm_sd.kernels.hip.gemm import GemmConfig
    from rocm_sd.kernels.hip.launch import Launcher

__all__ = ["launch"]

_ADDED = ("has_bias", "has_add", "has_residual")


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    residual: torch.Tensor | None,
    stride: int,
    padding: int,
    steps: int,
    splits: int,
    config: GemmConfig,
    parameters: tuple[tuple[str, int | str], ...],
    launcher: Launcher,
) -> None:
    """Fill `out` as conv2d.launch does, in `splits` parts of `steps` steps; `parameters` are those of conv2d.hip."""
    _, Cin, H, W = x.shape
    N, Cout, Ho, Wo = out.shape
    pixels = N * Ho * Wo
    parts = x.new_empty((splits, pixels, Cout), dtype=torch.float32)
    # What is added is of the last kernel alone: parts of several convolutions share this one.
    own = tuple(each for each in parameters if each[0] not in _ADDED)
    launcher.launch(
        Kernel("conv2d_split", "conv2d_split", own),
        (config.tiles(pixels, Cout), splits, 1),
        (x, weight, parts, pixels, Cout, H, W, Cin, Ho, Wo, stride, padding, steps, config.group_m),
    )
    finish(parts, out, bias, add, residual, launcher)
