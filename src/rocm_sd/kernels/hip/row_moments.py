"""Mean and sum of centred squares of each row of x, [M, C], in float32: all that a norm needs to know of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocm_sd.kernels.hip.launch import Kernel, access_width, ceil_div, parameters_of
from rocm_sd.kernels.hip.layer_norm_residual import row_parameters, row_split

if TYPE_CHECKING:
    import torch

    from rocm_sd.kernels.hip.launch import Launcher

__all__ = ["RowMoments", "allocate", "launch"]

_THREADS = 128


@dataclass(frozen=True)
class RowMoments:
    """[M, parts, 2] float32, (mean, sum of centred squares) of each `span` neighbours of a row of `width` values."""

    data: torch.Tensor
    span: int
    width: int

    @property
    def parts(self) -> int:
        return self.data.shape[1]


def allocate(like: torch.Tensor, span: int) -> RowMoments:
    """For the rows of `like`, [M, C], in parts of `span` columns; the caller fills them."""
    import torch  # noqa: PLC0415 -- importing this package needs none

    M, C = like.shape
    return RowMoments(like.new_empty(M, ceil_div(C, span), 2, dtype=torch.float32), span, C)


def launch(x: torch.Tensor, moments: RowMoments, launcher: Launcher) -> None:
    """Fill `moments`, of one part; rows of `x`, [M, C], may be any distance apart."""
    M, C = x.shape
    width = access_width(x.element_size(), C, x.stride(0), tensors=(x,))
    lanes, chunks = row_split(C // width, launcher.arch.wave_size or 32)
    threads = max(_THREADS, lanes)
    parameters = parameters_of(x, row_parameters(C, width, lanes, chunks, threads))
    arguments = (x, moments.data, M, C, x.stride(0), 1.0 / C)
    launcher.launch(Kernel("row_moments", "row_moments", parameters), (ceil_div(M, threads // lanes), 1, 1), arguments)
