"""What a server can do at most: clients that ask again as soon as they are answered, as many as it draws at once."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from rocm_sd.bench.serving import ANSWERED, REJECTED
from rocm_sd.bench.serving_http import said
from rocm_sd.bench.serving_load import asked, wanted_of
from rocm_sd.errors import RocmSdError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rocm_sd.bench.serving import Setting
    from rocm_sd.bench.serving_http import Client
    from rocm_sd.bench.serving_load import Progress

__all__ = ["Capacity", "capacity"]

# How many ask at first, and at most: one more as long as nothing waits in the server's queue.
_AT_ONCE, _MOST_AT_ONCE = 8, 64
_LOOK_S = 0.25
# It goes on until it has both, but not for longer than the last.
_SECONDS, _ANSWERS, _LONGEST_S = 10.0, 24, 60.0


@dataclass(frozen=True)
class Capacity:
    """Pictures a second, and the most that the server drew at once."""

    pictures_per_s: float
    drawn_at_once: int


def capacity(client: Client, setting: Setting, prompts: Sequence[str], progress: Progress) -> Capacity:
    """Raises RocmSdError where a request is lost or fails."""
    burst = _Burst(client, setting, prompts)
    try:
        burst.go(progress)
    finally:
        burst.over.set()
    progress(_SECONDS, _SECONDS, "capacity: waiting for the last pictures")
    return burst.result()


class _Burst:
    def __init__(self, client: Client, setting: Setting, prompts: Sequence[str]) -> None:
        self._client, self._setting, self._prompts = client, setting, prompts
        self.over = threading.Event()
        self._began = time.perf_counter()
        self._numbers = count()
        self._ends: list[float] = []
        self._wrong: list[str] = []
        self._threads: list[threading.Thread] = []
        self._drawn = 0

    def go(self, progress: Progress) -> None:
        for _ in range(_AT_ONCE):
            self._one_more()
        while not self.over.is_set() and not self._has_enough():
            status = said(self._client, "/api/status")
            self._drawn = max(self._drawn, _number(status.get("drawing")))
            if _number(status.get("queued")) == 0 and len(self._threads) < _MOST_AT_ONCE:
                self._one_more()
            what = f"capacity: {len(self._ends)} pictures, {len(self._threads)} at once"
            progress(min(self._spent(), _SECONDS), _SECONDS, what)
            self.over.wait(_LOOK_S)

    def result(self) -> Capacity:
        # Those that end now had fewer beside them.
        counted = sorted(self._ends)
        for thread in self._threads:
            thread.join()
        if self._wrong:
            raise RocmSdError(
                f"The server failed while its capacity was measured: {self._wrong[0]}.",
                hint="Its log has more. With --rate in requests a second, the run counts such requests.",
            )
        # The first round makes the server ready for so many at once. It ends at one time, and so does each after it.
        since = counted[_AT_ONCE - 1] if len(counted) > _AT_ONCE else self._began
        left = counted[_AT_ONCE:] or counted
        return Capacity(len(left) / max(left[-1] - since, 1e-6), self._drawn)

    def _spent(self) -> float:
        return time.perf_counter() - self._began

    def _has_enough(self) -> bool:
        if self._spent() >= _LONGEST_S:
            return bool(self._ends)
        return self._spent() >= _SECONDS and len(self._ends) >= _ANSWERS

    def _one_more(self) -> None:
        self._threads.append(threading.Thread(target=self._ask_again_and_again, name="rocm-sd client", daemon=True))
        self._threads[-1].start()

    def _ask_again_and_again(self) -> None:
        while not self.over.is_set():
            wanted = wanted_of(self._setting, self._prompts, next(self._numbers))
            found = asked(self._client, self._setting, wanted)
            if found.outcome == ANSWERED:
                self._ends.append(time.perf_counter())
            elif found.outcome == REJECTED:
                self.over.wait(found.retry_after_s or 1.0)
            else:
                self._wrong.append((found.why or found.outcome).rstrip("."))
                self.over.set()


def _number(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0
