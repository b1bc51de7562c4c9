"""total = x + residual; y = layer_norm(total) * weight + bias, x: [M, C], in one pass over memory. Or of x alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocm_sd.kernels.config import Config
from rocm_sd.kernels.hip.launch import HipRefused, Kernel, access_width, ceil_div, has, parameters_of

if TYPE_CHECKING:
    import torch

    from rocm_sd.kernels.hip.launch import Launcher

__all__ = ["LayerNormResidualConfig", "launch", "row_parameters", "row_split"]

_MOST_CHUNKS = 8  # a lane's share of a row stays in registers, and is unrolled
# By wave size: 5 chunks of 8 halves take 83 to 92 registers, with which gfx1100 holds its 16 waves; gfx942 holds its 8
# with at most 64, which 3 chunks take.
_FEW_CHUNKS = {32: 5, 64: 3}
_MOST_LANES = 1024


@dataclass(frozen=True)
class LayerNormResidualConfig(Config):
    """`threads` of one workgroup at least; a long row takes more."""

    threads: int = 128


def row_split(vectors: int, wave_size: int) -> tuple[int, int]:
    """(lanes, chunks) for a row of so many vectors: the fewest idle places, then the fewest chunks.

    Fewer than 8 lanes would split a cache line of 128 bytes over several loads.
    """
    splits = []
    for lanes in (1 << power for power in range(_MOST_LANES.bit_length())):
        chunks = ceil_div(vectors, lanes)
        if chunks <= _MOST_CHUNKS and (lanes >= 8 or chunks == 1):
            splits.append((chunks > _FEW_CHUNKS[wave_size], lanes * chunks, chunks, lanes))
    if not splits:
        raise HipRefused("layer_norm_residual (hip)", f"rows of {vectors} vectors: they do not stay in registers")
    _, _, chunks, lanes = min(splits)
    return lanes, chunks


def row_parameters(C: int, width: int, lanes: int, chunks: int, threads: int) -> tuple[tuple[str, int], ...]:
    even = int(lanes * chunks * width == C)
    return ("width", width), ("lanes", lanes), ("chunks", chunks), ("threads", threads), ("even", even)


def launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    total: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    config: LayerNormResidualConfig,
    launcher: Launcher,
) -> None:
    """Fill `y` and `total`, dense [M, C]; rows of `x` and `residual`, [M, C], may be any distance apart.

    All tensors are of one dtype. Without a residual there is no total.
    """
    M, C = x.shape
    strides = (x.stride(0), 0 if residual is None else residual.stride(0))
    width = access_width(x.element_size(), C, *strides, tensors=(x, residual, weight, bias, y, total))
    lanes, chunks = row_split(C // width, launcher.arch.wave_size or 32)
    threads = max(config.threads, lanes)
    split = row_parameters(C, width, lanes, chunks, threads)
    parameters = (*parameters_of(x, split), *has(residual=residual, weight=weight, bias=bias))
    arguments = (x, residual, weight, bias, y, total, M, C, *strides, 1.0 / C, eps)
    launcher.launch(
        Kernel("layer_norm_residual", "layer_norm_residual", parameters),
        (ceil_div(M, threads // lanes), 1, 1),
        arguments,
    )
