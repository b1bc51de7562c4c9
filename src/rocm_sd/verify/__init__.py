"""The proof ladder: how it is shown that a fast path is right.

>>> from rocm_sd.verify import emulated
>>> with emulated("gfx1100"):          # a card that is not there: its machine code runs on the CPU, slowly
...     picture = rocm_sd.optimize(pipe)("a red frog").images[0]
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rocm_sd.verify.device import emulated

__all__ = ["emulated"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("rocm_sd.verify.device"), name)
