"""y = the parts of a convolution's depth in their order + bias + add + residual; parts: [splits, pixels, Cout]."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_sd.kernels.hip.launch import Kernel, access_width, ceil_div, element_of

if TYPE_CHECKING:
    import torch

    from rocm_sd.kernels.hip.launch import Launcher

__all__ = ["launch", "launch_rows"]

_THREADS = 256  # as in conv2d_finish.hip
_WIDEST = 4  # float32 values in 16 bytes


def launch(
    parts: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    residual: torch.Tensor | None,
    launcher: Launcher,
) -> None:
    """Fill `out`, [N, Cout, H, W]; out and residual are dense channels-last, `add` is dense [N, Cout].

    `parts` are dense float32, the rest is of one dtype.
    """
    N, _, H, W = out.shape
    _launch(parts, out, bias, add, residual, N, H * W, launcher)


def launch_rows(
    parts: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, launcher: Launcher
) -> None:
    """Fill `y`, [M, N], from parts of a product: rows are the pixels of one picture. y and residual are dense."""
    _launch(parts, y, bias, None, residual, 1, y.shape[0], launcher)


def _launch(
    parts: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    residual: torch.Tensor | None,
    pictures: int,
    pixels: int,
    launcher: Launcher,
) -> None:
    channels = parts.shape[2]
    width = access_width(parts.element_size(), channels, tensors=(parts, bias, add, residual, out))
    width = width if width == _WIDEST else 1
    parameters = (
        ("element", element_of(out)),
        ("splits", parts.shape[0]),
        ("width", width),
        ("has_bias", int(bias is not None)),
        ("has_add", int(add is not None)),
        ("has_residual", int(residual is not None)),
    )
    launcher.launch(
        Kernel("conv2d_finish", "conv2d_finish", parameters),
        (ceil_div(pixels * channels, _THREADS * width), pictures, 1),
        (parts, bias, add, residual, out, pixels, pictures * pixels, channels),
    )
