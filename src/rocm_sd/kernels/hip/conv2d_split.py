"""conv2d whose depth is cut into parts: their sums go to memory as float32, and are added up in their order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rocm_sd.kernels.hip.launch import Kernel, access_width, ceil_div

if TYPE_CHECKING:
    from rocm_sd.kernels.hip.gemm import GemmConfig
    from rocm_sd.kernels.hip.launch import Launcher

__all__ = ["launch"]

_THREADS = 256  # of conv2d_finish, as in conv2d_split.hip
_WIDEST = 4  # float32 values in 16 bytes


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
    width = min(access_width(parts.element_size(), Cout, tensors=(parts, bias, add, residual, out)), _WIDEST)
    width = width if width == _WIDEST else 1
    parameters = (*parameters, ("splits", splits), ("width", width))
    sizes = (H, W, Cin, Ho, Wo, stride, padding)
    launcher.launch(
        Kernel("conv2d_split", "conv2d_split", parameters),
        (config.tiles(pixels, Cout), splits, 1),
        (x, weight, parts, pixels, Cout, *sizes, steps, config.group_m),
    )
    launcher.launch(
        Kernel("conv2d_split", "conv2d_finish", parameters),
        (ceil_div(Ho * Wo * Cout, _THREADS * width), N, 1),
        (parts, bias, add, residual, out, Ho * Wo, pixels, Cout),
    )
