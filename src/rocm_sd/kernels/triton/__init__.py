"""Device code in Triton: one file per op, a kernel body and its launcher; the config is passed in.

Importing this package needs no Triton; importing one of its modules does. Ask `why_not(device)` first.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rocm_sd import settings

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["bind_op", "launch_op", "skips_launches", "why_not"]


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


def why_not(device: torch.device) -> str | None:
    """The reason that Triton kernels cannot run on this device, or None if they can."""
    if not _installed():
        return "Triton is not installed"
    if device.type != "cuda" and not settings.current().triton_interpret:
        return f"Triton has no code for a tensor on {device.type}"
    return None


def launch_op(op: str, _device: torch.device, *arguments: Any) -> None:
    """Call the launcher of an op, whose module is imported at its first use: it needs Triton."""
    import_module(f"{__name__}.{op}").launch(*arguments)


def bind_op(op: str, *arguments: Any, bind: str = "bind") -> Callable[..., None] | None:
    """An op's launch for tensors that lie as these, to be made again and again; None where that would cost no less.

    `bind` is the function of the op's module that binds it.
    """
    module = import_module(f"{__name__}.{op}")
    if not import_module(f"{__name__}.bound").binds(module):
        return None
    bound: Callable[..., None] = getattr(module, bind)(*arguments)
    return bound


def skips_launches() -> bool:
    """Whether launches of this thread are only noted, to be compiled: then results are garbage (precompile.py)."""
    noting = sys.modules.get(f"{__name__}.precompile")
    return noting is not None and bool(noting.skips_launches())
