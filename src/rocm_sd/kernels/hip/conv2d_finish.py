"""y = the parts of a convolution's depth in their order + bias + add + residual; parts: [splits, pixels, Cout]."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_sd.kernels.hip.launch import Kernel, access_width, ceil_div, has, parameters_of

if TYPE_CHECKING:
    import torch

    from rocm_sd.kernels.hip.launch import Launcher

__all__ = ["launch"]

_THREADS = 256  # as in conv2d_finish.hip
_WIDEST = 4  # float32 values in 16 bytes


def launch(
    parts: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    residual: torch.Tensor | None,
    pictures: int,
    launcher: Launcher,
) -> None:
    """Fill `out`, [N, Cout, H, W]; out and residual are dense channels-last, `add` is dense [N, Cout].

    Or fill [M, N] from parts of a product: its rows are the pixels of one of the `pictures`. `parts` are dense float32,
    the rest is of one dtype.
    """
    splits, pixels, channels = parts.shape
    width = access_width(parts.element_size(), channels, tensors=(parts, bias, add, residual, out))
    width = width if width == _WIDEST else 1
    parameters = (("splits", splits), ("width", width))
    launcher.launch(
        Kernel(
            "conv2d_finish",
            "conv2d_finish",
            (*parameters_of(out, parameters), *has(bias=bias, add=add, residual=residual)),
        ),
        (ceil_div(pixels // pictures * channels, _THREADS * width), pictures, 1),
        (parts, bias, add, residual, out, pixels // pictures, pixels, channels),
    )
