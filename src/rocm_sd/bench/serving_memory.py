"""What a server's memory does while it is under load: it is asked at even times, beside the requests."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from rocm_sd.bench.serving import MemoryAt
from rocm_sd.bench.serving_http import seen

if TYPE_CHECKING:
    from typing_extensions import Self

    from rocm_sd.bench.serving_http import Client

__all__ = ["MemoryWatch"]

# As many as a plot shows, and not so many that the server would have work of it.
_TIMES, _LEAST_S = 120, 1.0


class MemoryWatch:
    """`with MemoryWatch(client, seconds) as watch:` and `watch.found` has what was seen, also of a run cut short."""

    def __init__(self, client: Client, seconds: float) -> None:
        self._client, self._every = client, max(_LEAST_S, seconds / _TIMES)
        self._found: list[MemoryAt] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="rocm-sd memory", daemon=True)

    @property
    def found(self) -> tuple[MemoryAt, ...]:
        return tuple(self._found)

    def __enter__(self) -> Self:
        self._began = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        # Not waited for: a server that is gone answers nothing for some time.
        self._over.set()

    def _look(self) -> None:
        times = 0
        while not self._over.wait(max(0.0, self._began + times * self._every - time.perf_counter())):
            now, said = time.perf_counter() - self._began, seen(self._client)
            if said.host_bytes is not None and not self._over.is_set():
                self._found.append(MemoryAt(round(now, 3), said.host_bytes, said.device_bytes or 0.0))
            # What took long leaves out the times that it lasted.
            times = max(times + 1, int((time.perf_counter() - self._began) / self._every))
