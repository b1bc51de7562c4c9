"""Batches of workgroups in several processes, which are forks of this one.

Workgroups know nothing of one another, so each process takes every n-th batch. Global memory is an anonymous mapping
that all of them share; what a process has to say comes back through a pipe. A fork runs numpy's functions alone, never
torch, whose threads it does not have: it frees nothing that it was born with, and ends without cleaning up.

It is an attempt: where a process fails, is gone or does not answer, the caller executes everything once more by itself.
So an error is always that of one process, and a fork that was born with a lock which nobody opens costs only time.
"""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import select
import signal
import sys
import time
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from rocm_sd import workers
from rocm_sd.verify.emulator.errors import EmulationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from rocm_sd.verify.code_object import CodeObject

__all__ = ["NotDivided", "divided", "most_processes", "zeros"]

# For so many seconds after other programs were found at the cores a launch that is not asked to be divided is not.
_CROWDED_SECONDS = 10.0
# A fork gets so many seconds, and so many times those of this process's share, before nobody waits for it any longer.
_PATIENCE_SECONDS, _PATIENCE = 5.0, 4.0

Batch = TypeVar("Batch")
Report = TypeVar("Report")


class NotDivided(Exception):
    """Several processes did not do the whole work, or did not do it as one would have."""


def most_processes(code: CodeObject, wanted: int | None) -> int:
    """As many as are wanted; or one a core that this process may use, and in a worker, which has its core, one alone.

    Never more than one where workgroups may meet: an atomic operation is none between processes.
    """
    if not sys.platform.startswith("linux") or not code.assembly or "atomic" in code.assembly:
        return 1
    if wanted is not None:
        return max(wanted, 1)
    return 1 if workers.inside() or _crowd.is_there() else len(os.sched_getaffinity(0))


class _Crowd:
    """Whether other programs use the cores: then forks take turns with them, and a launch gets slower by them."""

    def __init__(self) -> None:
        self._until = 0.0

    def is_there(self) -> bool:
        return time.perf_counter() < self._until

    @contextmanager
    def looked_for(self) -> Iterator[None]:
        """Within, this process only computes: where that takes longer than the time it gets, it waits for a core."""
        began, busy = time.perf_counter(), time.process_time()
        yield
        passed, busy = time.perf_counter() - began, time.process_time() - busy
        if passed > 1.25 * busy:
            self._until = time.perf_counter() + _CROWDED_SECONDS


_crowd = _Crowd()


def zeros(size: int, *, shared: bool) -> NDArray[np.uint8]:
    """Bytes that are 0; `shared`: those that a fork writes are seen here."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8) if shared and size else np.zeros(size, np.uint8)


def divided(
    batches: Sequence[Batch],
    count: int,
    execute: Callable[[Batch], object],
    report: Callable[[], Report],
    born: Callable[[], object],
) -> list[Report]:
    """Execute every batch, in `count` processes with this one; `report()` of each when it is done, this one's first.

    `born` is called by the others before they begin. Raises NotDivided where one of them does not come to its end.
    """
    others: list[_Fork[Report]] = []
    began = time.perf_counter()
    try:
        try:
            for place in range(1, count):
                others.append(_Fork(batches[place::count], execute, report, born))  # noqa: PERF401 -- ended if one fails
            with _crowd.looked_for():
                reports = [_share(batches[::count], execute, report)]
        except (EmulationError, OSError) as error:
            raise NotDivided("This process failed.") from error
        patience = _PATIENCE_SECONDS + _PATIENCE * (time.perf_counter() - began)
        return reports + [other.result(patience) for other in others]
    finally:
        for other in others:
            other.end()


def _share(batches: Sequence[Batch], execute: Callable[[Batch], object], report: Callable[[], Report]) -> Report:
    for batch in batches:
        execute(batch)
    return report()


class _Fork(Generic[Report]):
    """A process that executes its share and then sends its report, or nothing where it failed."""

    def __init__(
        self,
        batches: Sequence[Batch],
        execute: Callable[[Batch], object],
        report: Callable[[], Report],
        born: Callable[[], object],
    ) -> None:
        self._read, write = os.pipe()
        try:
            with warnings.catch_warnings():
                # Python warns of locks that other threads hold: see above.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._process = os.fork()
        except OSError:
            os.close(self._read)
            os.close(write)
            raise
        if self._process:
            os.close(write)
            return
        try:
            # What this process was born with belongs to the other, down to the memory of a GPU.
            gc.disable()
            born()
            sent = pickle.dumps(_share(batches, execute, report))
            with os.fdopen(write, "wb") as pipe:
                pipe.write(sent)
        finally:
            os._exit(0)

    def result(self, patience: float) -> Report:
        deadline = time.perf_counter() + patience
        received = bytearray()
        answer = select.poll()
        answer.register(self._read, select.POLLIN)
        while answer.poll(max(deadline - time.perf_counter(), 0.0) * 1e3):
            part = os.read(self._read, 1 << 20)
            if not part:
                break
            received += part
        else:
            raise NotDivided("A process does not answer.")
        try:
            sent: Report = pickle.loads(received)  # noqa: S301 -- our own fork's
        except (EOFError, pickle.UnpicklingError) as error:
            raise NotDivided("A process failed or is gone.") from error
        return sent

    def end(self) -> None:
        """The process is over, whether or not it was done."""
        os.close(self._read)
        # It cannot have been waited for by others: its number is still its own.
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
