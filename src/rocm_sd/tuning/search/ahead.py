"""Compile ahead: several workers call candidates once, so that the compiler's cache has them when they are timed.

Nothing is timed meanwhile: calls of other processes would slow one another.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import torch

from rocm_sd.tuning.search.workbench import ask, compile_candidate
from rocm_sd.workers import Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rocm_sd.tuning.search.calls import OpCall
    from rocm_sd.tuning.search.candidates import Candidate
    from rocm_sd.workers import Worker

    _Group = tuple[OpCall, Sequence[Candidate]]

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
    wanted: Sequence[_Group],
    device: torch.device,
    *,
    jobs: int,
    seconds: float,
    timeout_s: float,
    on_failed: Callable[[OpCall, Candidate, str], object],
    on_progress: Callable[[str], object] = lambda _what: None,
) -> set[tuple[OpCall, Candidate]]:
    """What was compiled in the time; a few candidates of every problem come before more of the first.

    `on_failed` hears, in the caller's thread, of those that raised, crashed or hung.
    """
    end = time.monotonic() + seconds
    stopped = threading.Event()
    answered: queue.SimpleQueue[tuple[OpCall, Candidate, str | None] | None] = queue.SimpleQueue()

    def compile_group(call: OpCall, candidates: Sequence[Candidate], worker: Worker) -> None:
        for candidate in candidates:
            left = end - time.monotonic()
            if left <= 0 or stopped.is_set():
                return
            answer = ask(worker, compile_candidate, call, device, candidate, timeout=timeout_s, within=left)
            if "unchecked" in answer:
                stopped.set()
            elif answer:
                answered.put((call, candidate, answer.get("failed")))

    compiled = set()
    with Pool(jobs) as pool:
        groups = [pool.lend(partial(compile_group, *group)) for group in _groups(wanted)]
        for group in groups:
            group.add_done_callback(lambda _: answered.put(None))
        for _ in groups:
            for call, candidate, failed in iter(answered.get, None):
                on_progress(f"compiling {call.op}: {candidate}")
                if failed is None:
                    compiled.add((call, candidate))
                else:
                    on_failed(call, candidate, failed)
    return compiled


def _groups(wanted: Sequence[_Group]) -> Iterator[_Group]:
    longest = max((len(candidates) for _, candidates in wanted), default=0)
    for start in range(0, longest, _AT_ONCE):
        for call, candidates in wanted:
            if candidates[start : start + _AT_ONCE]:
                yield call, candidates[start : start + _AT_ONCE]
