"""How convolutions are laid out: as measured here or as the data say, where that is as exact as stock's own layout.

What the data say holds where the library computes in that layout: torch may copy there and back around each call
(strides.py). What was measured here had those copies in its time.

A library may sum in another order in each layout. In float32 that shows: oneDNN with AVX-512 adds up a channels-last
convolution in one chain, and with 256 channels its error is 3.7 times that of its other layout.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from rocm_sd import arch
from rocm_sd.engine.convolutions.strides import answers_channels_last
from rocm_sd.engine.installed import Installed
from rocm_sd.tuning import Choice, environment, resolve
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["CHANNELS_LAST", "choose_layout", "convolution_dtype", "lay_out"]

CHANNELS_LAST = "channels_last"
# What a whole picture may be further from exact than stock's: an error of all its convolutions is one of the picture.
_TIMES = 1.5
# As many as the blocks in the middle of a small model have, where the order of a sum begins to matter.
_CHANNELS, _SIDE = 256, 8


def choose_layout(device: torch.device, dtype: torch.dtype | None) -> Choice:
    """For convolutions in this dtype; `implementation` is CHANNELS_LAST, or anything else for the layout they have."""
    choice = resolve.choose("memory_format", arch.detect(device).name, {}, environment.current(device), "")
    if choice.implementation != CHANNELS_LAST or dtype is None:
        return choice
    if choice.source != "measured here" and not answers_channels_last(device, dtype):
        return Choice(
            STOCK, why="torch answers a channels-last convolution contiguous here, and would copy at each call"
        )
    # In half precision the rounding of each result is a thousand times as large as what the order of a sum makes.
    if dtype is not torch.float32:
        return choice
    less_exact = _why_less_exact(device)
    return choice if less_exact is None else Choice(STOCK, why=less_exact)


def lay_out(modules: Iterable[nn.Module], why: str) -> Installed:
    """Lay the weights of their convolutions out channels-last, but for those that are, or have none to change."""
    relaid: list[nn.Conv2d] = []

    def restore() -> None:
        for layer in relaid:
            weight = _held(layer)
            if weight is not None:
                weight.data = weight.data.contiguous()

    try:
        for layer in (layer for module in modules for layer in module.modules() if isinstance(layer, nn.Conv2d)):
            weight = getattr(layer, "weight", None)
            if weight is not None and weight.is_contiguous() and weight.numel():
                weight.data = weight.data.contiguous(memory_format=torch.channels_last)
                relaid.append(layer)
    except BaseException:
        restore()
        raise
    return Installed(lambda: (f"{len(relaid)} convolutions run channels-last ({why})",), restore)


def _held(layer: nn.Conv2d) -> torch.Tensor | None:
    """The layer's weight, also where an offload that came later has put it aside."""
    if layer.weight.device.type != "meta":
        return layer.weight
    put_aside = getattr(layer.__dict__.get("_hf_hook"), "weights_map", None)
    return None if put_aside is None else put_aside["weight"]


def convolution_dtype(module: nn.Module) -> torch.dtype | None:
    """Of its first convolution; None where it has none."""
    return next((layer.weight.dtype for layer in module.modules() if isinstance(layer, nn.Conv2d)), None)


@cache
def _why_less_exact(device: torch.device) -> str | None:
    """A convolution in float32, in both layouts against float64; None where channels-last is no worse."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, _CHANNELS, _SIDE, _SIDE, generator=random)
    weight = torch.randn(_CHANNELS, _CHANNELS, 3, 3, generator=random) / (9 * _CHANNELS) ** 0.5
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        exact = F.conv2d(x.double(), weight.double(), padding=1)
        stock, ours = (
            _rms(_convolved(x.to(device), weight.to(device), layout).cpu().double() - exact)
            for layout in (torch.contiguous_format, torch.channels_last)
        )
    rounding = torch.finfo(torch.float32).eps * _rms(exact)
    # Written so that NaN, which compares false, is worse.
    if ours <= _TIMES * stock + rounding:
        return None
    return f"channels-last, float32 convolutions are {ours / max(stock, rounding):.1f} times as far from exact here"


def _convolved(x: torch.Tensor, weight: torch.Tensor, layout: torch.memory_format) -> torch.Tensor:
    return F.conv2d(x.contiguous(memory_format=layout), weight.contiguous(memory_format=layout), padding=1)


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())
