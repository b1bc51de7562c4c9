"""Threads of one process on one GPU: any number of them run models, and one that captures a graph does so by itself.

torch has one stream to capture on, one state of the random numbers that every capture begins and ends, and gives back
the scratch of GEMM libraries around a capture from beneath whoever is using it. Two captures at once, or one beside a
replay, fail, or are baked into each other.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    import torch

__all__ = ["Turns", "capturing", "running"]


class Turns:
    """`running`: beside others that do. `capturing`: while nobody else runs anything. Both can be nested, and one may
    capture in the middle of a run: it is between two launches then, and others that capture go first or wait.

    Nobody waits for another thread's work while `running`: that thread may be waiting to capture.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: Counter[int] = Counter()
        self._wanted = 0
        self._captures: int | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        me = threading.get_ident()
        with self._changed:
            # Whoever wants to capture is let in before others begin; those that have begun come to their end.
            self._changed.wait_for(
                lambda: self._captures == me or me in self._running or (self._captures is None and not self._wanted)
            )
            self._running[me] += 1
        try:
            yield
        finally:
            with self._changed:
                self._leave(me)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        me = threading.get_ident()
        if self._captures == me:
            yield
            return
        with self._changed:
            around = self._running.pop(me, 0)
            self._wanted += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._captures is None and not self._running)
                self._captures = me
            except BaseException:
                # Ctrl-C: the run that it was to be within goes on to its end.
                self._come_back(me, around)
                raise
            finally:
                self._wanted -= 1
        try:
            yield
        finally:
            with self._changed:
                self._captures = None
                self._come_back(me, around)

    def _come_back(self, me: int, around: int) -> None:
        if around:
            self._running[me] = around
        self._changed.notify_all()

    def _leave(self, me: int) -> None:
        self._running[me] -= 1
        if not self._running[me]:
            del self._running[me]
            self._changed.notify_all()


_TURNS = Turns()


def running(device: torch.device) -> AbstractContextManager[None]:
    """Around a model's call, or whatever else multiplies on a GPU, where several threads share it."""
    return _TURNS.running() if device.type == "cuda" else nullcontext()


def capturing(device: torch.device) -> AbstractContextManager[None]:
    """Around a capture and the calls that lead up to it."""
    return _TURNS.capturing() if device.type == "cuda" else nullcontext()
