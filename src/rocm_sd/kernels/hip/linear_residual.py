"""y = x @ weight.T + bias + residual, x: [M, K], weight: [N, K], y: [M, N]; float32 accumulation, one rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocm_sd.arch import MatrixUnit
from rocm_sd.kernels.hip.launch import Kernel, access_width, ceil_div, element_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from rocm_sd.kernels.hip.launch import Launcher

__all__ = ["TILES", "LinearResidualConfig", "launch"]

_WIDEST = 8  # values of 16 bits in 16 bytes


@dataclass(frozen=True)
class LinearResidualConfig:
    """A tile of block_m x block_n in steps of block_k, computed by waves_m x waves_n waves in fragments of one size.

    `stages` is how many steps stand in LDS; `group_m` tiles that share columns of y run side by side.
    """

    block_m: int
    block_n: int
    block_k: int
    waves_m: int
    waves_n: int
    stages: int
    fragment: int
    group_m: int = 8

    @classmethod
    def from_mapping(cls, values: Mapping[str, int]) -> LinearResidualConfig:
        return cls(**values)


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
    kernel = Kernel(
        "linear_residual",
        "linear_residual",
        (
            ("element", element_of(x)),
            ("block_m", config.block_m),
            ("block_n", config.block_n),
            ("block_k", config.block_k),
            ("waves_m", config.waves_m),
            ("waves_n", config.waves_n),
            ("stages", config.stages),
            ("fragment", config.fragment),
            ("wide", int(width == _WIDEST)),
            ("has_bias", int(bias is not None)),
            ("has_residual", int(residual is not None)),
        ),
    )
    tiles = ceil_div(M, config.block_m) * ceil_div(N, config.block_n)
    launcher.launch(kernel, (tiles, 1, 1), (x, weight, bias, residual, y, M, N, K, *strides, config.group_m))
