"""y = x @ weight.mT + bias + residual for each matrix of a batch; float32 accumulation, one rounding.

What `linear_residual` does, with one launch for the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_sd.kernels.hip.gemm import WIDEST
from rocm_sd.kernels.hip.launch import Kernel, access_width, element_of
from rocm_sd.kernels.hip.linear_residual import DOT_WAVE64, TILES, LinearResidualConfig

if TYPE_CHECKING:
    import torch

    from rocm_sd.kernels.hip.launch import Launcher

__all__ = ["DOT_WAVE64", "TILES", "LinearResidualConfig", "launch"]


def launch(
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
    parameters = (
        ("element", element_of(x)),
        *config.parameters,
        ("wide", int(wide)),
        ("has_bias", int(bias is not None)),
        ("has_residual", int(residual is not None)),
    )
    grid = (config.tiles(M, N), 1, B)
    arguments = (*tensors, M, N, K, *strides, *distances, config.group_m)
    launcher.launch(Kernel("batched_linear", "batched_linear", parameters), grid, arguments)
