"""The host's own forward wherever ours may not, or cannot, do the work."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.integrations.a1111.class_forwards import is_usual, why_not_layers
from rocm_sd.integrations.a1111.permission import PERMISSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

__all__ = ["STOCK", "guarded", "one_dtype"]

# What a forward of ours returns where the host's own is to answer.
STOCK: Any = NotImplemented


def one_dtype(x: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """Whether the block computes in x's dtype and no other.

    The host runs a half precision model under autocast, which takes norms and softmax to float32 and everything else
    to half. The ops do the same inside, so that autocast is left for the time of the call; but only where x, weights
    and autocast agree on the dtype.
    """
    if weight is None or x.dtype != weight.dtype or x.device != weight.device:
        return False
    device = x.device.type
    return not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) == x.dtype


def guarded(
    part: str, weight: Callable[[Any], torch.Tensor | None], *, unet: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`weight`: one of the block's, by which its dtype is known. `unet`: of the UNet, which has a permission."""

    def wrap(ours: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(ours)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = STOCK
            if args and _may(self, args[0], weight, unet=unet):
                try:
                    result = _without_autocast(ours, self, *args, **kwargs)
                except Exception as error:  # noqa: BLE001 -- whatever it was, the host's own forward can say it, or do
                    PERMISSION.fail(part, error)
            return type(self).forward(self, *args, **kwargs) if result is STOCK else result

        return forward

    return wrap


def _may(module: nn.Module, x: Any, weight: Callable[[Any], torch.Tensor | None], *, unet: bool) -> bool:
    if PERMISSION.broken is not None or torch.is_grad_enabled() or type(x) is not torch.Tensor:
        return False
    # The UNet's layers were looked at before it was called; a VAE's parts are called one by one.
    if (PERMISSION.unet if unet else why_not_layers()) is not None:
        return False
    return is_usual(module) and one_dtype(x, weight(module))


def _without_autocast(ours: Callable[..., Any], module: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return ours(module, x, *args, **kwargs)
    with torch.autocast(device, enabled=False):
        return ours(module, x, *args, **kwargs)
