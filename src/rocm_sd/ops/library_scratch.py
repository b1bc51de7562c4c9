"""What torch keeps for GEMM libraries to work in: 32 MiB a stream on an H200, never given back.

Given back before a graph is captured and after, each graph has scratch of its own: else the second graph would have
that of the first baked in, and lose it with it. Given back where no product follows, it does not lie beside the peak.

It is taken from every stream at once, also from beneath graphs of others that were captured where such scratch was
there already. Torch's own captures do the same; therefore it is done around captures and nowhere else.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["give_back", "given_back"]

_local = threading.local()


@contextmanager
def given_back() -> Iterator[None]:
    """Around what is captured, and around the calls that lead up to it: before, after, and at `give_back` within."""
    outer = getattr(_local, "around_a_capture", False)
    _local.around_a_capture = True
    _clear()
    try:
        yield
    finally:
        _clear()
        _local.around_a_capture = outer


def give_back() -> None:
    """Where no product follows for a while: nothing happens but around a capture."""
    if getattr(_local, "around_a_capture", False):
        _clear()


def _clear() -> None:
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # noqa: SLF001 -- torch has no other name for it
    if clear is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        clear()
