"""y = layer_norm(x) @ weight.T + bias, x: [M, K], weight: [N, K], y: [M, N]; the norm's result is never in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rocm_sd.arch import MatrixUnit
from rocm_sd.kernels.hip.gemm import WIDEST, tiles_of
from rocm_sd.kernels.hip.launch import HipRefused, Kernel, access_width, has, parameters_of
from rocm_sd.kernels.hip.linear_residual import DOT_WAVE64 as PLAIN_DOT_WAVE64
from rocm_sd.kernels.hip.linear_residual import TILES as PLAIN_TILES
from rocm_sd.kernels.hip.linear_residual import LinearResidualConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from rocm_sd.arch import Arch
    from rocm_sd.kernels.hip.launch import Argument, Launcher
    from rocm_sd.kernels.hip.row_moments import RowMoments

__all__ = ["DOT_WAVE64", "TILES", "LinearResidualConfig", "Norm", "launch", "norm_arguments", "tiles"]

# Those of linear_residual, without the tall one on gfx1030, which spills 5 registers in bfloat16. A norm takes 16 to 30
# registers more: on gfx1100 the large tile leaves room for 6 waves a SIMD and not 8, on the others for as many.
TILES: Mapping[MatrixUnit, tuple[LinearResidualConfig, ...]] = {
    **PLAIN_TILES,
    MatrixUnit.DOT: (PLAIN_TILES[MatrixUnit.DOT][0], PLAIN_TILES[MatrixUnit.DOT][-1]),
}
DOT_WAVE64 = PLAIN_DOT_WAVE64[1:]  # with a norm the large one spills 2 registers in float16


def tiles(arch: Arch) -> tuple[LinearResidualConfig, ...]:
    return tiles_of(TILES, DOT_WAVE64, arch) or ()


class Norm(NamedTuple):
    """LayerNorm over K values; weight and bias: [K]."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float = 1e-5


def norm_arguments(
    op: str,
    x: torch.Tensor,
    moments: RowMoments,
    norm: Norm,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
) -> tuple[Argument, ...]:
    """What the kernels with a norm on the way in are given, but for `group_m`; what they cannot read is refused."""
    K, (M, N) = x.shape[1], y.shape
    if moments.width != K or moments.data.shape[0] != M:
        raise ValueError(f"moments of {moments.data.shape[0]} rows of {moments.width} values are not those of x")
    strides = (x.stride(0), weight.stride(0), y.stride(0))
    tensors = (x, norm.weight, norm.bias, weight, bias, y)
    if access_width(x.element_size(), K, N, *strides, tensors=tensors) != WIDEST:
        raise HipRefused(f"{op} (hip)", f"[{M}, {K}] to {N}: rows do not begin at multiples of 16 bytes")
    return (
        x, moments.data, norm.weight, norm.bias, weight, bias, y, M, N, K, *strides,
        moments.parts, moments.span, 1.0 / K, norm.eps,
    )  # fmt: skip


def launch(
    x: torch.Tensor,
    moments: RowMoments,
    norm: Norm,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    config: LinearResidualConfig,
    launcher: Launcher,
) -> None:
    """Fill `y`, [M, N]; `moments` are those of the rows of `x`, [M, K].

    Rows of all matrices may be any multiple of 16 bytes apart. All are of one dtype, float16 or bfloat16.
    """
    arguments = norm_arguments("norm_linear", x, moments, norm, weight, bias, y)
    parameters = (*parameters_of(x, config.parameters), *has(bias=bias))
    grid = (config.tiles(*y.shape), 1, 1)
    launcher.launch(Kernel("norm_linear", "norm_linear", parameters), grid, (*arguments, config.group_m))
