"""h = layer_norm(x); y = (h @ weight[:F].T + bias[:F]) * gelu(h @ weight[F:].T + bias[F:]); h is never in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_sd.kernels.hip.gemm import tiles_of
from rocm_sd.kernels.hip.launch import HipRefused, Kernel, has, parameters_of
from rocm_sd.kernels.hip.linear_geglu import DOT_WAVE64 as PLAIN_DOT_WAVE64
from rocm_sd.kernels.hip.linear_geglu import TILES, LinearGegluConfig
from rocm_sd.kernels.hip.norm_linear import norm_arguments

if TYPE_CHECKING:
    import torch

    from rocm_sd.arch import Arch
    from rocm_sd.kernels.hip.launch import Launcher
    from rocm_sd.kernels.hip.norm_linear import Norm
    from rocm_sd.kernels.hip.row_moments import RowMoments

__all__ = ["DOT_WAVE64", "TILES", "LinearGegluConfig", "launch", "tiles"]

DOT_WAVE64 = PLAIN_DOT_WAVE64[1:]  # with a norm the large one spills 3 registers in float16


def tiles(arch: Arch) -> tuple[LinearGegluConfig, ...]:
    return tiles_of(TILES, DOT_WAVE64, arch) or ()


def launch(
    x: torch.Tensor,
    moments: RowMoments,
    norm: Norm,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    config: LinearGegluConfig,
    launcher: Launcher,
) -> None:
    """Fill `y`, [M, F], of x: [M, K] and weight: [2F, K]; all else as in `norm_linear`."""
    M, F = y.shape
    if (F + config.block_n) * weight.stride(0) * weight.element_size() >= 2**32:
        raise HipRefused("norm_geglu (hip)", f"gates {F} rows of {weight.stride(0)} values after their values")
    arguments = norm_arguments("norm_geglu", x, moments, norm, weight, bias, y)
    parameters = (*parameters_of(x, config.parameters), *has(bias=bias))
    grid = (config.tiles(M, 2 * F), 1, 1)
    launcher.launch(Kernel("norm_geglu", "norm_geglu", parameters), grid, (*arguments, config.group_m))
