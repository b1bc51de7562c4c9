"""y: [N, C, scale * H, scale * W] from x: [N, C, H, W], nearest or bilinear, both channels-last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_sd.kernels.hip.launch import Kernel, access_width, bits_of, ceil_div, element_of

if TYPE_CHECKING:
    import torch

    from rocm_sd.kernels.hip.launch import Launcher

__all__ = ["launch"]

_THREADS = 128  # as in upsample.hip


def launch(x: torch.Tensor, out: torch.Tensor, scale: int, mode: str, launcher: Launcher) -> None:
    """Fill `out`: [N, C, scale * H, scale * W]; both are dense channels-last."""
    N, C, H, W = x.shape
    width = access_width(x.element_size(), C, tensors=(x, out))
    bilinear = mode == "bilinear"
    parameters = (
        # Nearest moves values and never looks at them.
        ("element", element_of(x) if bilinear else bits_of(x)),
        ("width", width),
        ("scale", scale),
        ("bilinear", int(bilinear)),
    )
    grid = (ceil_div(W * (C // width), _THREADS), H, N)
    launcher.launch(Kernel("upsample", "upsample", parameters), grid, (x, out, C, H, W))
