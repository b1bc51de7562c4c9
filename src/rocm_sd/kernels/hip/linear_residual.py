"""y = x @ weight.T + bias + residual, x: [M, K], weight: [N, K], y: [M, N]; float32 accumulation, one rounding.

Where K is cut into parts, their sums go to memory as float32, and are added up in their order. `launch_batched` is one
launch for a batch of matrices, which may lie apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rocm_sd.arch import MatrixUnit
from rocm_sd.kernels.hip.conv2d_finish import launch as finish
from rocm_sd.kernels.hip.gemm import WIDEST, GemmConfig, tiles_of
from rocm_sd.kernels.hip.launch import Kernel, access_width, ceil_div, has, parameters_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.arch import Arch
    from rocm_sd.kernels.hip.launch import Launcher

__all__ = ["DOT_WAVE64", "TILES", "LinearResidualConfig", "launch", "launch_batched", "tiles"]


@dataclass(frozen=True)
class LinearResidualConfig(GemmConfig):
    """block_m rows by block_n columns of y; `linear_residual` takes K in `split_k` parts, and nothing else does."""

    split_k: int = 1


# Without spills on every architecture of the unit, for both dtypes. A step of 64 values is a cache line of 128 bytes.
_LARGE = LinearResidualConfig(128, 128, 64, 2, 4, 1, 16)
_TALL = LinearResidualConfig(128, 64, 64, 2, 2, 1, 16)
_SMALL = LinearResidualConfig(64, 64, 64, 2, 2, 2, 16)
TILES: Mapping[MatrixUnit, tuple[LinearResidualConfig, ...]] = {
    MatrixUnit.DOT: (_LARGE, _TALL, _SMALL),
    MatrixUnit.WMMA_GFX11: (_LARGE, _TALL, _SMALL),
    MatrixUnit.WMMA_GFX12: (_LARGE, _TALL, _SMALL),
    MatrixUnit.MFMA: (
        LinearResidualConfig(128, 128, 64, 2, 2, 1, 32),
        LinearResidualConfig(128, 64, 64, 2, 2, 1, 32),
        _SMALL,
    ),
}
# Dot products by waves of 64. Eight of them leave each 128 registers, in which 128x128 spills; four leave it 256.
DOT_WAVE64 = (LinearResidualConfig(128, 128, 64, 2, 2, 1, 16), _TALL, _SMALL)


def tiles(arch: Arch) -> tuple[LinearResidualConfig, ...]:
    return tiles_of(TILES, DOT_WAVE64, arch) or ()


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    config: LinearResidualConfig,
    launcher: Launcher,
) -> None:
    """Fill `y`, [M, N]; rows of all matrices may be any distance apart. All are of one dtype."""
    M, K = x.shape
    N = weight.shape[0]
    strides = (x.stride(0), weight.stride(0), 0 if residual is None else residual.stride(0), y.stride(0))
    width = access_width(x.element_size(), K, N, *strides, tensors=(x, weight, bias, residual, y))
    parameters = parameters_of(x, config.parameters, wide=width == WIDEST)
    steps = ceil_div(K, config.block_k)
    # Every part must have work: of 9 steps in 4 parts of 3 the fourth would have none, and there are 3 parts.
    of_part = ceil_div(steps, config.split_k)
    splits = ceil_div(steps, of_part)
    # The kernel that adds up goes through values that follow one another.
    if splits > 1 and y.is_contiguous() and (residual is None or residual.is_contiguous()):
        parts = x.new_empty((splits, M, N), dtype=torch.float32)
        launcher.launch(
            Kernel("linear_split", "linear_split", parameters),
            (config.tiles(M, N), splits, 1),
            (x, weight, parts, M, N, K, x.stride(0), weight.stride(0), of_part, config.group_m),
        )
        finish(parts, y, bias, None, residual, 1, launcher)
        return
    parameters = (*parameters, *has(bias=bias, residual=residual))
    launcher.launch(
        Kernel("linear_residual", "linear_residual", parameters),
        (config.tiles(M, N), 1, 1),
        (x, weight, bias, residual, y, M, N, K, *strides, config.group_m),
    )


def launch_batched(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    config: LinearResidualConfig,
    launcher: Launcher,
) -> None:
    """Fill `y`, [B, M, N]; x: [B, M, K]; weight: [B, N, K]; bias: [B, N]; residual: [B, M, N]; all of one dtype.

    The values of a row are side by side; rows and matrices may be any distance apart: `expand` gives one to the whole
    batch.
    """
    B, M, K = x.shape
    N = weight.shape[1]
    strides = tuple(0 if t is None else t.stride(1) for t in (x, weight, residual, y))
    distances = tuple(0 if t is None else t.stride(0) for t in (x, weight, bias, residual, y))
    tensors = (x, weight, bias, residual, y)
    wide = access_width(x.element_size(), K, N, *strides, *distances, tensors=tensors) == WIDEST
    parameters = (*parameters_of(x, config.parameters, wide=wide), *has(bias=bias, residual=residual))
    grid = (config.tiles(M, N), 1, B)
    arguments = (*tensors, M, N, K, *strides, *distances, config.group_m)
    launcher.launch(Kernel("batched_linear", "batched_linear", parameters), grid, arguments)
