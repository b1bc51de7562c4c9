"""Compile ahead: several workers call candidates once, so that the compiler's cache has them when they are timed.

Nothing is timed meanwhile: calls of other processes would slow one another.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from typing import TYPE_CHECKING

import torch

from rocm_sd.search.process import Lost, OutOfTime, Worker, WorkerCannotStart

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rocm_sd.search.calls import Call
    from rocm_sd.search.candidates import Candidate

    _Task = tuple[Call, Sequence[Candidate]]
    _Heard = tuple[Call, Candidate, str | None]

__all__ = ["SHARE", "compile_all", "default_jobs"]

SHARE = 0.45  # of the budget, at most
_MEMORY_OF_ONE = 6 * 2**30  # bytes: a process on a GPU, its libraries, and the tensors of a large problem
_AT_ONCE = 6  # candidates of one problem: its tensors are made once for them


def default_jobs(device: torch.device) -> int:
    """One on a CPU, where nothing is compiled; on a GPU as many as cores and its free memory allow."""
    if device.type != "cuda":
        return 1
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(8, os.cpu_count() or 1, free // _MEMORY_OF_ONE))


def compile_all(
    wanted: Sequence[tuple[Call, Sequence[Candidate]]],
    device: str,
    *,
    jobs: int,
    seconds: float,
    timeout_s: float,
    on_failed: Callable[[Call, Candidate, str], object],
    on_progress: Callable[[str], object] = lambda _what: None,
) -> set[tuple[Call, Candidate]]:
    """What was compiled in the time; a few candidates of every problem come before more of the first.

    `on_failed` hears, in the caller's thread, of those that raised, crashed or hung.
    """
    tasks = _tasks(wanted)
    if tasks.empty():
        return set()
    told: queue.SimpleQueue[_Heard | None] = queue.SimpleQueue()
    crew = _Crew(tasks, told, device, time.monotonic() + seconds, timeout_s)
    threads = [threading.Thread(target=crew.work, daemon=True) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    compiled, working = set(), len(threads)
    try:
        while working:
            heard = told.get()
            if heard is None:
                working -= 1
                continue
            call, candidate, reason = heard
            on_progress(f"compiling {call.op}: {candidate}")
            if reason is None:
                compiled.add((call, candidate))
            elif reason:
                on_failed(call, candidate, reason)
    finally:
        crew.stopped.set()
    for thread in threads:
        thread.join()
    return compiled


def _tasks(wanted: Sequence[tuple[Call, Sequence[Candidate]]]) -> queue.SimpleQueue[_Task]:
    tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
    longest = max((len(candidates) for _, candidates in wanted), default=0)
    for start in range(0, longest, _AT_ONCE):
        for call, candidates in wanted:
            if candidates[start : start + _AT_ONCE]:
                tasks.put((call, candidates[start : start + _AT_ONCE]))
    return tasks


class _Crew:
    """What the threads share."""

    def __init__(
        self,
        tasks: queue.SimpleQueue[_Task],
        told: queue.SimpleQueue[_Heard | None],
        device: str,
        end: float,
        timeout_s: float,
    ) -> None:
        self.tasks, self.told, self.device, self.end, self.timeout_s = tasks, told, device, end, timeout_s
        self.stopped = threading.Event()

    def work(self) -> None:
        # A worker dies with the thread that started it, so each thread keeps its own.
        with Worker(self.device) as worker:
            try:
                while not self.stopped.is_set():
                    call, candidates = self.tasks.get_nowait()
                    for candidate in candidates:
                        left = self.end - time.monotonic()
                        if left <= 0 or self.stopped.is_set():
                            return
                        reason = _compiled(worker, call, candidate, self.timeout_s, left)
                        self.told.put((call, candidate, reason))
            except (queue.Empty, WorkerCannotStart):
                return
            finally:
                self.told.put(None)


def _compiled(worker: Worker, call: Call, candidate: Candidate, timeout: float, within: float) -> str | None:
    """None where it is, the reason where it failed, and an empty text where time was over."""
    try:
        answer = worker.compile(call, candidate, timeout, within)
    except OutOfTime:
        return ""
    except Lost as lost:
        return str(lost)
    return answer.get("failed")
