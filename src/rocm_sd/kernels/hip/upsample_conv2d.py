"""y = conv2d(nearest 2x of x, weight, padding 1) + bias, channels-last, with no enlarged picture in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_sd.kernels.hip.conv2d import DOT_WAVE64, TILES, Conv2dConfig, require_reach, tiles
from rocm_sd.kernels.hip.gemm import WIDEST
from rocm_sd.kernels.hip.launch import Kernel, access_width, ceil_div, has, parameters_of

if TYPE_CHECKING:
    import torch

    from rocm_sd.kernels.hip.launch import Launcher

__all__ = ["DOT_WAVE64", "TILES", "Conv2dConfig", "launch", "tiles"]


def launch(
    x: torch.Tensor,
    parity_weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    config: Conv2dConfig,
    launcher: Launcher,
) -> None:
    """Fill `out`, [N, Cout, 2H, 2W]; x and out are dense channels-last, parity_weight is dense [4, Cout, 2, 2, Cin].

    All are of one dtype.
    """
    N, Cin, H, W = x.shape
    Cout = out.shape[1]
    require_reach("upsample_conv2d", x, config, lines=ceil_div(config.block_m, W) + 3)
    wide = access_width(x.element_size(), Cin, tensors=(x, parity_weight)) == WIDEST
    wide_out = access_width(x.element_size(), Cout, tensors=(bias, out)) == WIDEST
    parameters = (*parameters_of(x, config.parameters, wide=wide, wide_out=wide_out), *has(bias=bias))
    pixels = N * H * W
    grid = (config.tiles(pixels, Cout) * 4, 1, 1)
    arguments = (x, parity_weight, bias, out, pixels, Cout, H, W, Cin, config.group_m)
    launcher.launch(Kernel("upsample_conv2d", "upsample_conv2d", parameters), grid, arguments)
