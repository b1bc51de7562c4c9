"""Whether a batch of pictures can fit at all: asked before its first tensor is made.

A host that runs out of memory takes the whole machine with it, and says nothing. What is computed here is less than
any engine needs, so nothing is refused that would fit:

    batch * itemsize * max(what the UNet's skip connections hold at its middle, the pictures)    on the device
    batch * 4 * latents                                                  on the host, where the noise is drawn
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.engine import free_memory
from rocm_sd.errors import RocmSdError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["TooLargeBatch", "require_memory"]

# Stock on a CPU takes 16 to 117 times the skip connections (emoji-sd and a small SD 1.5, batches of 8 and 32), guidance
# doubled; one half of guidance at a time halves it.
_ON_A_CPU = 8
_HOST = torch.device("cpu")


class TooLargeBatch(RocmSdError):
    def __init__(self, batch: int, height: int, width: int, needed: int, there: int) -> None:
        fits = there * batch // needed
        hint = f"Try a batch of {fits} or fewer" if fits else "Try smaller pictures"
        super().__init__(
            f"A batch of {batch} with pictures of {width}x{height} takes {_size(needed)} of memory at least, and there "
            f"are {_size(there)}.",
            hint=f"{hint}: an engine needs more than the least.",
        )


def require_memory(pipe: Any, batch: int, height: int, width: int, device: torch.device, dtype: torch.dtype) -> None:
    """Raises TooLargeBatch. Models of other kinds than a UNet are held to their latents and pictures alone."""
    scale = getattr(pipe, "vae_scale_factor", 8)
    h, w = -(-height // scale), -(-width // scale)
    channels = getattr(getattr(getattr(pipe, "vae", None), "config", None), "latent_channels", 4)
    unet = getattr(getattr(pipe, "unet", None), "config", None) or {}
    on_device = batch * dtype.itemsize * max(_skips(unet, h, w), 3 * height * width)
    on_host = batch * 4 * channels * h * w
    host = free_memory(_HOST)
    if device.type == "cpu":
        on_host += _ON_A_CPU * on_device
    elif device.type == "cuda" and host is not None:
        # All that the card has, whoever holds it now, and what a driver may take of the host's.
        there = torch.cuda.mem_get_info(device)[1] + host
        if on_device > there:
            raise TooLargeBatch(batch, height, width, on_device, there)
    if host is not None and on_host > host:
        raise TooLargeBatch(batch, height, width, on_host, host)


def _skips(unet: Mapping[str, Any], h: int, w: int) -> int:
    """Elements of one picture that wait for the way up while the middle is computed."""
    widths = list(unet.get("block_out_channels") or ())
    layers = unet.get("layers_per_block", 1)
    each = list(layers) if isinstance(layers, (list, tuple)) else [layers] * len(widths)
    waiting = widths[0] * h * w if widths else 0
    for number, (width, count) in enumerate(zip(widths, each, strict=False)):
        waiting += count * width * h * w
        if number < len(widths) - 1:
            h, w = -(-h // 2), -(-w // 2)
            waiting += width * h * w
    return waiting


def _size(number: int) -> str:
    return f"{number / 1e9:.1f} GB" if number < 1e12 else f"{number // 10**9} GB"
