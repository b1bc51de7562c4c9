"""linear_residual whose K is cut into parts: their sums go to memory as float32, and are added up in their order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rocm_sd.kernels.hip.conv2d_finish import launch_rows as finish
from rocm_sd.kernels.hip.launch import Kernel

if TYPE_CHECKING:
    from rocm_sd.kernels.hip.gemm import GemmConfig
    from rocm_sd.kernels.hip.launch import Launcher

__all__ = ["launch"]


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    steps: int,
    splits: int,
    config: GemmConfig,
    parameters: tuple[tuple[str, int | str], ...],
    launcher: Launcher,
) -> None:
    """Fill `y`, dense as the residual, in `splits` parts of `steps` steps; `parameters` are without what is added."""
    M, K = x.shape
    N = weight.shape[0]
    parts = x.new_empty((splits, M, N), dtype=torch.float32)
    launcher.launch(
        Kernel("linear_split", "linear_split", parameters),
        (config.tiles(M, N), splits, 1),
        (x, weight, parts, M, N, K, x.stride(0), weight.stride(0), steps, config.group_m),
    )
    finish(parts, y, bias, residual, launcher)
