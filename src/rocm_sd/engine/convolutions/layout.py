"""How convolutions are laid out: as measured here or as the data say, where that is as exact as stock's own layout.

What the data say holds where the library computes in that layout: torch may copy there and back around each call
(strides.py). What was measured here had those copies in its time. Whether it is as exact is measured, too
(exactness.py): torch and its libraries have other kernels for each layout, of convolutions and of what follows them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from rocm_sd import arch
from rocm_sd.engine.convolutions.exactness import why_less_exact
from rocm_sd.engine.convolutions.strides import answers_channels_last
from rocm_sd.engine.installed import Installed
from rocm_sd.tuning import Choice, environment, resolve
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["CHANNELS_LAST", "choose_layout", "convolution_dtype", "lay_out"]

CHANNELS_LAST = "channels_last"
_COMPUTED = frozenset({torch.float16, torch.bfloat16, torch.float32})


def choose_layout(device: torch.device, dtype: torch.dtype | None) -> Choice:
    """For convolutions in this dtype; `implementation` is CHANNELS_LAST, or anything else for the layout they have."""
    choice = resolve.choose("memory_format", arch.detect(device).name, {}, environment.current(device), "")
    if choice.implementation != CHANNELS_LAST or dtype is None:
        return choice
    if choice.source != "measured here" and not answers_channels_last(device, dtype):
        return Choice(
            STOCK, why="torch answers a channels-last convolution contiguous here, and would copy at each call"
        )
    # Weights of narrower dtypes are turned to one of these before anything is computed with them.
    less_exact = why_less_exact(device, dtype) if dtype in _COMPUTED else None
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
