"""[N, C, H, W] from contiguous to channels-last and back: each item is a matrix, and the copy is its transpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_sd.kernels.hip.launch import Kernel, access_width, bits_of, ceil_div

if TYPE_CHECKING:
    import torch

    from rocm_sd.kernels.hip.launch import Launcher

__all__ = ["launch"]

# As in layout_copy.hip.
_SIDE = 8  # threads along each side of a tile of layout_copy_wide
_FEW = 8  # the most channels of layout_copy_few
_FEW_PIXELS = 512
_PLAIN_TILE = 32


def launch(x: torch.Tensor, out: torch.Tensor, channels_last: bool, launcher: Launcher) -> None:
    """Fill `out`: channels-last from a contiguous x, or contiguous from a channels-last x."""
    N, C, H, W = x.shape
    size, HW = x.element_size(), H * W
    widest = 16 // size
    P, Q = (C, HW) if channels_last else (HW, C)

    def kernel(name: str, channels: int = 1) -> Kernel:
        parameters = (("element", bits_of(x)), ("channels", channels), ("last", int(channels_last)))
        return Kernel("layout_copy", f"layout_copy_{name}", parameters)

    if C <= _FEW and access_width(size, HW, tensors=(x, out)) == widest:
        launcher.launch(kernel("few", C), (ceil_div(HW, _FEW_PIXELS), N, 1), (x, out, HW))
        return
    wide = access_width(size, P, Q, tensors=(x, out)) == widest
    tile = _SIDE * widest if wide else _PLAIN_TILE
    grid = (ceil_div(P, tile) * ceil_div(Q, tile), N, 1)
    launcher.launch(kernel("wide" if wide else "plain"), grid, (x, out, P, Q))
