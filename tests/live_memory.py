"""The live peak of what torch allocates on a CPU, storage by storage: the measure that predictions are held to."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Iterator


class LiveMemory(TorchDispatchMode):
    """Counts each storage from the operation that returns it until nobody holds it; what was there before is not seen.

    What an operation allocates inside and frees before it returns is not seen either.
    """

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._counts = True
        self._seen: set[int] = set()
        self._known = [tensor.untyped_storage() for tensor in known]
        self._seen.update(storage._cdata for storage in self._known)

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """What is allocated inside is in another memory, and not counted."""
        self._counts = False
        yield
        self._counts = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage(), inputs)
        return out

    def _count(self, storage: torch.UntypedStorage, inputs: set[int]) -> None:
        key = storage._cdata
        if key in self._seen or key in inputs:
            return
        size = storage.nbytes() if self._counts else 0
        self._seen.add(key)
        self.alive += size
        if self.alive > self.peak:
            # What only a cycle holds is nobody's: Triton's interpreter leaves such arguments behind.
            gc.collect(1)
            self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.alive -= size


def live_peak(call, *known: torch.Tensor) -> int:
    """Bytes at the highest point of call(), its result among them."""
    with LiveMemory(*known) as memory:
        call()
    return memory.peak
