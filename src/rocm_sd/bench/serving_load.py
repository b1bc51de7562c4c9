"""Requests that come when they are due, whether or not earlier ones are over: as clients do who do not know each other.

A client that waits for its answer before it asks again lets a slow server set the pace, and hides how long others would
have waited. Here the times are drawn before the run (a Poisson process, by a seed), each request has a thread, and its
latency counts from when it was due.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from rocm_sd.bench.serving import ANSWERED, FAILED, LOST, OPEN, REJECTED, Request
from rocm_sd.bench.serving_http import PATIENCE_S, Answer, NoAnswer, Refused, why_no_picture
from rocm_sd.errors import RocmSdError
from rocm_sd.plain_json import NotPlain, shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from http.client import HTTPConnection

    from rocm_sd.bench.serving import Setting
    from rocm_sd.bench.serving_http import Client

    Progress = Callable[[float, float, str], None]

__all__ = ["Load", "Progress", "arrivals", "asked", "first_picture", "wanted_of"]

_GENERATIONS = "/v1/images/generations"
_LOOK_S = 0.05
# A server that is there again within these is asked on.
_TRIES, _BETWEEN_S = 3, 0.5


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """When requests are due: the first at once, the others with exponential times between them."""
    random = np.random.default_rng(seed)
    times = [0.0]
    while times[-1] < seconds:
        times.append(times[-1] + float(random.exponential(1 / rate)))
    return times[:-1]


def wanted_of(setting: Setting, prompts: Sequence[str], number: int) -> dict[str, Any]:
    return {
        "model": setting.model, "prompt": prompts[number % len(prompts)], "n": 1, "response_format": "b64_json",
        "output_format": "png", "size": f"{setting.width}x{setting.height}", "steps": setting.steps,
        "seed": setting.seed + number,
    }  # fmt: skip


def first_picture(client: Client, setting: Setting, prompts: Sequence[str]) -> None:
    """One that does not count: what the server refuses is said before anything is measured."""
    try:
        answer = client.ask("POST", _GENERATIONS, wanted_of(setting, prompts, 0), timeout=PATIENCE_S)
    except (Refused, NoAnswer) as error:
        raise RocmSdError(f"The first picture did not come ({error}).", hint="The server's log has more.") from error
    if answer.status != 200:
        words = _message(answer) or f"it answers {answer.status}"
        key = answer.status in {401, 403}
        raise RocmSdError(
            f"The server draws no such picture: {words}",
            hint="Give --key-file FILE, with one of its keys." if key else None,
        )
    why = why_no_picture(answer, setting.width, setting.height)
    if why is not None:
        raise RocmSdError(f"The first picture is wrong: {why}.", hint="The server's log has more.")


def _message(answer: Answer) -> str:
    """The server's own words."""
    try:
        return shortened(str(answer.json()["error"]["message"]), 200)
    except (NotPlain, KeyError, TypeError):
        return ""


def asked(client: Client, setting: Setting, wanted: dict[str, Any], through: HTTPConnection | None = None) -> Request:
    """What became of one request; its times are of itself alone: they begin when it is sent."""
    sent = time.perf_counter()
    try:
        answer = client.ask("POST", _GENERATIONS, wanted, timeout=PATIENCE_S, through=through)
    except Refused as error:
        return Request(0.0, FAILED, time.perf_counter() - sent, why=f"no connection: {error}")
    except NoAnswer as error:
        return Request(0.0, LOST, time.perf_counter() - sent, why=f"no answer: {error}")
    seconds = time.perf_counter() - sent
    if answer.status == 429:
        return Request(0.0, REJECTED, seconds, answer.status, retry_after_s=_retry_after(answer))
    if answer.status != 200:
        why = _message(answer) or f"status {answer.status}"
        return Request(0.0, FAILED, seconds, answer.status, why=why)
    # After the clock: to look at a picture is not the server's time.
    why_not = why_no_picture(answer, setting.width, setting.height)
    return Request(0.0, LOST if why_not else ANSWERED, seconds, answer.status, why=why_not)


def _retry_after(answer: Answer) -> float | None:
    text = answer.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdecimal() and len(text) < 7 else None


class Load:
    """One run. `run` may be interrupted at any time: `requests` has what became of those that were sent until then."""

    def __init__(self, client: Client, setting: Setting, prompts: Sequence[str], progress: Progress) -> None:
        self._client, self._setting, self._prompts, self._progress = client, setting, prompts, progress
        self._due = arrivals(setting.rate, setting.seconds, setting.seed)
        self._sent: list[float] = []
        self._over: dict[int, Request] = {}
        self._connections: dict[int, HTTPConnection] = {}
        self._lock, self._asking_whether_gone = threading.Lock(), threading.Lock()
        self._stopped = False
        self._began = time.perf_counter()
        self.sent_for_s = 0.0
        # When the server was found to be gone.
        self.gone_s: float | None = None

    @property
    def planned(self) -> int:
        return len(self._due)

    @property
    def requests(self) -> tuple[Request, ...]:
        with self._lock:
            return tuple(
                self._over.get(number)
                or Request(_round(self._due[number]), OPEN, late_s=_round(sent - self._due[number]))
                for number, sent in enumerate(self._sent)
            )

    def run(self) -> None:
        """Returns when all are over, or when the server is gone."""
        self._began = time.perf_counter()
        try:
            for number, due in enumerate(self._due):
                if not self._wait_until(due):
                    break
                self._send(number)
            else:
                self._wait_until(self._setting.seconds)
            self.sent_for_s = self._elapsed()
            while self._open:
                self._show(f"waiting for {self._open} answers")
                time.sleep(_LOOK_S)
        finally:
            self._stop()

    @property
    def _open(self) -> int:
        return len(self._sent) - len(self._over)

    def _elapsed(self) -> float:
        return time.perf_counter() - self._began

    def _wait_until(self, due: float) -> bool:
        """Whether the server is still there."""
        while self.gone_s is None and (left := due - self._elapsed()) > 0:
            self._show(f"{len(self._sent)} of {self.planned} sent, {self._open} open")
            time.sleep(min(left, _LOOK_S))
        return self.gone_s is None

    def _show(self, what: str) -> None:
        self._progress(min(self._elapsed(), self._setting.seconds), self._setting.seconds, what)

    def _send(self, number: int) -> None:
        connection = self._client.connection()
        with self._lock:
            self._sent.append(self._elapsed())
            self._connections[number] = connection
        threading.Thread(target=self._one, args=(number, connection), name="rocm-sd client", daemon=True).start()

    def _one(self, number: int, connection: HTTPConnection) -> None:
        wanted = wanted_of(self._setting, self._prompts, number)
        before = self._elapsed()
        found = asked(self._client, self._setting, wanted, connection)
        due = self._due[number]
        request = Request(
            _round(due), found.outcome, _round(before - due + (found.seconds or 0.0)), found.status,
            _round(before - due), found.retry_after_s, found.why,
        )  # fmt: skip
        if found.outcome in {FAILED, LOST} and found.status is None:
            self._ask_whether_gone()
        with self._lock:
            del self._connections[number]
            # What an interruption closed was not lost by the server.
            if not self._stopped:
                self._over[number] = request

    def _ask_whether_gone(self) -> None:
        with self._asking_whether_gone:
            for _ in range(_TRIES):
                if self.gone_s is not None or self._stopped:
                    return
                try:
                    self._client.ask("GET", "/healthz")
                except (Refused, NoAnswer):
                    time.sleep(_BETWEEN_S)
                else:
                    return
            self.gone_s = self._elapsed()

    def _stop(self) -> None:
        """The server is told that nobody waits any more: it draws no further."""
        self.sent_for_s = self.sent_for_s or self._elapsed()
        with self._lock:
            self._stopped = True
            left = list(self._connections.values())
        for connection in left:
            with suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)


def _round(seconds: float) -> float:
    """To a microsecond; a clock that is read twice may differ by less."""
    return round(max(0.0, seconds), 6)
