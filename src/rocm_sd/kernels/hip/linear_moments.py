"""y = x @ weight.T + bias + residual as `linear_residual`, and the moments of the rows of y for the norm after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_sd.kernels.hip.gemm import WIDEST
from rocm_sd.kernels.hip.launch import HipRefused, Kernel, access_width, has, parameters_of
from rocm_sd.kernels.hip.linear_residual import DOT_WAVE64, TILES, LinearResidualConfig

if TYPE_CHECKING:
    import torch

    from rocm_sd.kernels.hip.launch import Launcher
    from rocm_sd.kernels.hip.row_moments import RowMoments

__all__ = ["DOT_WAVE64", "TILES", "LinearResidualConfig", "launch"]


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    moments: RowMoments,
    config: LinearResidualConfig,
    launcher: Launcher,
) -> None:
    """Fill `y`, [M, N], which may be the residual, and `moments`, whose span is the config's block_n."""
    M, K = x.shape
    N = weight.shape[0]
    if moments.span != config.block_n or moments.width != N:
        raise ValueError(f"moments of {moments.span} columns of {moments.width}: tiles have {config.block_n} of {N}")
    strides = (x.stride(0), weight.stride(0), 0 if residual is None else residual.stride(0), y.stride(0))
    if access_width(x.element_size(), K, N, *strides, tensors=(x, weight, bias, residual, y)) != WIDEST:
        raise HipRefused("linear_moments (hip)", f"[{M}, {K}] to {N}: rows do not begin at multiples of 16 bytes")
    parameters = (*parameters_of(x, config.parameters), *has(bias=bias, residual=residual))
    arguments = (x, weight, bias, residual, y, moments.data, M, N, K, *strides, config.group_m)
    launcher.launch(Kernel("linear_moments", "linear_moments", parameters), (config.tiles(M, N), 1, 1), arguments)
