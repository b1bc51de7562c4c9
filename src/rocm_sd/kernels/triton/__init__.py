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
    import torch

__all__ = ["launch_op", "skips_launches", "why_not"]


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


def skips_launches() -> bool:
    """Whether launches of this thread are only noted, to be compiled: then results are garbage (precompile.py)."""
    noting = sys.modules.get(f"{__name__}.precompile")
    return noting is not None and bool(noting.skips_launches())
