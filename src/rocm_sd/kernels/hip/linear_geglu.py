"""y = (x @ weight[:F].T + bias[:F]) * gelu(x @ weight[F:].T + bias[F:]), x: [M, K], weight: [2F, K], y: [M, F]."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_sd.arch import MatrixUnit
from rocm_sd.kernels.hip.gemm import WIDEST, GemmConfig, tiles_of
from rocm_sd.kernels.hip.launch import HipRefused, Kernel, access_width, has, parameters_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from rocm_sd.arch import Arch
    from rocm_sd.kernels.hip.launch import Launcher

__all__ = ["BY_UNIT", "DOT_WAVE64", "TILES", "LinearGegluConfig", "launch", "tiles"]


class LinearGegluConfig(GemmConfig):
    """block_m rows by block_n sums, which are block_n / 2 columns of y: a value and a gate for each."""


# No tile of its own: `launch` takes the smallest of the matrix unit. No tile is one that every unit has.
BY_UNIT = LinearGegluConfig(0, 0, 0, 0, 0, 0, 0, group_m=0)

# Without spills on every architecture of the unit, for both dtypes. A step of 64 values is a cache line of 128 bytes,
# and so are 64 columns of y.
_WIDE = LinearGegluConfig(128, 256, 64, 4, 4, 1, 16)
_LARGE = LinearGegluConfig(128, 128, 64, 2, 4, 1, 16)
_FLAT = LinearGegluConfig(64, 128, 64, 2, 4, 1, 16)
_SMALL = LinearGegluConfig(64, 64, 64, 2, 2, 1, 16)
TILES: Mapping[MatrixUnit, tuple[LinearGegluConfig, ...]] = {
    MatrixUnit.DOT: (LinearGegluConfig(128, 128, 64, 4, 4, 1, 16), _FLAT, _SMALL),
    MatrixUnit.WMMA_GFX11: (_WIDE, _LARGE, _FLAT, _SMALL),
    MatrixUnit.WMMA_GFX12: (_WIDE, _LARGE, _FLAT, _SMALL),
    MatrixUnit.MFMA: (
        LinearGegluConfig(128, 256, 64, 2, 4, 1, 16),
        LinearGegluConfig(128, 128, 64, 2, 4, 1, 32),
        LinearGegluConfig(64, 128, 64, 2, 4, 1, 32),
        LinearGegluConfig(64, 64, 64, 2, 2, 1, 32),
    ),
}
# Dot products by waves of 64. A wave has 64 sums or more of a row: of fewer some lanes would have no column of y.
DOT_WAVE64 = (
    LinearGegluConfig(128, 128, 64, 2, 2, 1, 16),
    LinearGegluConfig(64, 128, 64, 2, 2, 1, 16),
    LinearGegluConfig(64, 128, 64, 4, 2, 1, 16),
    LinearGegluConfig(64, 64, 64, 4, 1, 1, 16),
)


def tiles(arch: Arch) -> tuple[LinearGegluConfig, ...]:
    return tiles_of(TILES, DOT_WAVE64, arch) or ()


def _smallest(arch: Arch) -> LinearGegluConfig:
    found = tiles(arch)
    if not found:
        raise HipRefused("linear_geglu by HIP", f"the architecture {arch.name}: nothing is known of its products")
    return found[-1]


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    config: LinearGegluConfig,
    launcher: Launcher,
) -> None:
    """Fill `y`, [M, F]; rows of all matrices may be any distance apart. All are of one dtype."""
    if not config.block_m:
        config = _smallest(launcher.arch)
    K = x.shape[1]
    M, F = y.shape
    if (F + config.block_n) * weight.stride(0) * weight.element_size() >= 2**32:
        raise HipRefused("linear_geglu by HIP", f"gates {F} rows of {weight.stride(0)} values after their values")
    strides = (x.stride(0), weight.stride(0), y.stride(0))
    wide = access_width(x.element_size(), K, F, *strides, tensors=(x, weight, bias, y)) == WIDEST
    parameters = (*parameters_of(x, config.parameters, wide=wide), *has(bias=bias))
    grid = (config.tiles(M, 2 * F), 1, 1)
    arguments = (x, weight, bias, y, M, F, K, *strides, config.group_m)
    launcher.launch(Kernel("linear_geglu", "linear_geglu", parameters), grid, arguments)
