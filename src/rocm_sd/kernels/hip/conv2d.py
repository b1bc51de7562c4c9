"""y = conv2d(x, weight) + bias + add + residual, channels-last, 1x1 and 3x3; float32 accumulation, one rounding.

Where the depth is cut into parts, their sums go to memory as float32, and are added up in their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rocm_sd.arch import MatrixUnit
from rocm_sd.kernels.hip.conv2d_finish import launch as finish
from rocm_sd.kernels.hip.gemm import WIDEST, GemmConfig, tiles_of
from rocm_sd.kernels.hip.launch import HipRefused, Kernel, access_width, ceil_div, has, parameters_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.arch import Arch
    from rocm_sd.kernels.hip.launch import Launcher

__all__ = ["DOT_WAVE64", "NARROW_TILES", "TILES", "Conv2dConfig", "launch", "require_reach", "tiles"]


@dataclass(frozen=True)
class Conv2dConfig(GemmConfig):
    """block_m pixels by block_n channels; steps of block_k channels of one tap, in `split_k` parts."""

    split_k: int = 1


# Without spills on every architecture of the unit, for both dtypes. A step of 64 values is a cache line of 128 bytes.
_LARGE = Conv2dConfig(128, 128, 64, 2, 4, 1, 16)
_TALL = Conv2dConfig(128, 64, 64, 4, 2, 1, 16)
_SMALL = Conv2dConfig(64, 64, 64, 2, 2, 1, 16)
TILES: Mapping[MatrixUnit, tuple[Conv2dConfig, ...]] = {
    # In 8 waves 128x128 of bfloat16 takes all 256 registers, and value by value spills.
    MatrixUnit.DOT: (Conv2dConfig(128, 128, 64, 4, 4, 1, 16), _TALL, _SMALL),
    MatrixUnit.WMMA_GFX11: (_LARGE, _TALL, _SMALL),
    MatrixUnit.WMMA_GFX12: (_LARGE, _TALL, _SMALL),
    MatrixUnit.MFMA: (Conv2dConfig(128, 128, 64, 2, 4, 1, 32), _TALL, _SMALL),
}
# Dot products by waves of 64. 128x128 takes all 256 registers of four waves, and value by value spills.
DOT_WAVE64 = (Conv2dConfig(128, 64, 64, 2, 2, 1, 16), _TALL, _SMALL)
# For the last layer of a UNet or a VAE, of three or four channels: of 64 columns nearly all would be thrown away.
_16 = (Conv2dConfig(128, 16, 64, 4, 1, 1, 16), Conv2dConfig(64, 16, 64, 4, 1, 1, 16))
# With 16 columns waves of 64 have more lanes than runs of sums, and those of dot products meet in the banks of LDS.
_32 = (Conv2dConfig(128, 32, 64, 4, 1, 1, 16), Conv2dConfig(64, 32, 64, 4, 1, 1, 16))
NARROW_TILES: Mapping[MatrixUnit, tuple[Conv2dConfig, ...]] = {
    MatrixUnit.DOT: _32,
    MatrixUnit.WMMA_GFX11: _16,
    MatrixUnit.WMMA_GFX12: _16,
    MatrixUnit.MFMA: _32,
}


def tiles(arch: Arch) -> tuple[Conv2dConfig, ...]:
    return tiles_of(TILES, DOT_WAVE64, arch) or ()


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    residual: torch.Tensor | None,
    stride: int,
    padding: int,
    config: Conv2dConfig,
    launcher: Launcher,
) -> None:
    """Fill `out`; x, weight, residual and out are dense channels-last, `add` is dense [N, Cout]; all of one dtype."""
    N, Cin, H, W = x.shape
    _, Cout, Ho, Wo = out.shape
    size = weight.shape[2]
    # From the last line of one picture to the first of the next it may be further than a stride.
    step = max(stride, H - (Ho - 1) * stride)
    require_reach("conv2d", x, config, lines=(ceil_div(config.block_m, Wo) + 1) * step + size)
    # Loads of eight values; 0 is one by one.
    wide = {WIDEST: 1, WIDEST // 2: 2}.get(access_width(x.element_size(), Cin, tensors=(x, weight)), 0)
    wide_out = access_width(x.element_size(), Cout, tensors=(bias, add, residual, out)) == WIDEST
    parameters = parameters_of(x, config.parameters, kernel_size=size, padded=padding > 0, wide=wide, wide_out=wide_out)
    # As `steps` in conv.hpp: where channels come 16 bytes at a time, each tap ends with a step of its own.
    depth = size * size
    steps = depth * ceil_div(Cin, config.block_k) if wide == 1 else ceil_div(depth * Cin, config.block_k)
    # Every part must have work: of 9 steps in 4 parts of 3 the fourth would have none, and there are 3 parts.
    of_part = ceil_div(steps, config.split_k)
    pixels = N * Ho * Wo
    sizes = (pixels, Cout, H, W, Cin, Ho, Wo, stride, padding)
    if (splits := ceil_div(steps, of_part)) > 1:
        parts = x.new_empty((splits, pixels, Cout), dtype=torch.float32)
        # What is added is of the last kernel alone: parts of several convolutions share this one.
        launcher.launch(
            Kernel("conv2d_split", "conv2d_split", parameters),
            (config.tiles(pixels, Cout), splits, 1),
            (x, weight, parts, *sizes, of_part, config.group_m),
        )
        finish(parts, out, bias, add, residual, N, launcher)
        return
    parameters = (*parameters, *has(bias=bias, add=add, residual=residual))
    arguments = (x, weight, bias, add, residual, out, *sizes, config.group_m)
    launcher.launch(Kernel("conv2d", "conv2d", parameters), (config.tiles(pixels, Cout), 1, 1), arguments)


def require_reach(name: str, x: torch.Tensor, config: GemmConfig, lines: int) -> None:
    """A tile's pixels lie within `lines` lines of x, which are not further apart than window_reach in conv.hpp."""
    _, Cin, _, W = x.shape
    if lines * W * Cin * x.element_size() >= 2**30:
        raise HipRefused(f"{name} by HIP", f"lines of {W} pixels of {Cin} channels in tiles of {config.block_m} pixels")
