"""The worker process as seen from outside: asked one thing at a time, with so many seconds to answer."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.search.calls import Call
    from rocm_sd.search.candidates import Candidate

__all__ = ["Lost", "OutOfTime", "Worker", "WorkerCannotStart"]


class Lost(Exception):
    """The worker crashed, or was stopped since a candidate gave no answer in the time that it had."""


class OutOfTime(Exception):
    """The time of the one who asked was over before that of the candidate: nothing is known of it."""


class WorkerCannotStart(Exception):
    """It ended before it was asked anything: a fault of the installation, not of a candidate."""


class Worker:
    """Started when first asked, and anew after it was lost. Use as a context: the process ends with it."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.started = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Any = None
        self._pending = b""

    def __enter__(self) -> Worker:  # noqa: PYI034 -- Self came with Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def compile(self, call: Call, candidate: Candidate, timeout: float, within: float) -> Mapping[str, Any]:
        return self._ask({"do": "compile"}, call, candidate, timeout, within)

    def measure(self, call: Call, candidate: Candidate, turns: int, timeout: float, within: float) -> Mapping[str, Any]:
        """`timeout` seconds are the candidate's; `within`, all that there are, a new worker's start included.

        Raises `Lost` or `OutOfTime`; a worker that is gone is started anew for the next question.
        """
        return self._ask({"do": "measure", "turns": turns}, call, candidate, timeout, within)

    def _ask(
        self, request: dict[str, Any], call: Call, candidate: Candidate, timeout: float, within: float
    ) -> Mapping[str, Any]:
        end = time.monotonic() + within
        if self._process is None:
            self._start(within)
        process = self._process
        assert process is not None
        assert process.stdin is not None
        request |= {
            "call": call.to_dict(), "implementation": candidate.implementation, "config": candidate.config.to_dict(),
            "device": self.device, "path": sys.path,
        }  # fmt: skip
        try:
            try:
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
            except BrokenPipeError:
                raise self._crashed() from None
            answer: Mapping[str, Any] = json.loads(self._answer(timeout, end))
        except BaseException:
            # Also when the user stops the tuner: an answer that comes later would be taken for the next one's.
            self.stop()
            raise
        if answer.get("broken"):
            self.stop()
        return answer

    def _answer(self, timeout: float, end: float) -> bytes:
        left = end - time.monotonic()
        line = self._line(min(timeout, left))
        if line is not None:
            return line
        if left < timeout:
            raise OutOfTime
        raise Lost(f"hung: stopped after {timeout:.3g} s without an answer")

    def _start(self, within: float) -> None:
        # Packages are found where this process found them, and not in the folder that it was started in.
        places = os.pathsep.join(place for place in sys.path if place)
        environment = {**os.environ, "PYTHONPATH": places, "PYTHONSAFEPATH": "1"}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 -- lives as long as the process that writes to it
        self._pending = b""
        self.started += 1
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rocm_sd.search.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
        )
        try:
            ready = self._line(within)
        except Lost as lost:
            self.stop()
            raise WorkerCannotStart(str(lost)) from None
        except BaseException:
            self.stop()
            raise
        if ready is None:
            self.stop()
            raise OutOfTime

    def _line(self, timeout: float) -> bytes | None:
        """One line of its answers, or None where there is none in so many seconds."""
        assert self._process is not None
        assert self._process.stdout is not None
        end = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                left = end - time.monotonic()
                if left <= 0 or not selector.select(left):
                    return None
                read = os.read(self._process.stdout.fileno(), 1 << 20)
                if not read:
                    raise self._crashed()
                self._pending += read
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _crashed(self) -> Lost:
        assert self._process is not None
        code = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        said = f"; it last said: {lines[-1][:200]}" if lines else ""
        how = f"by signal {-code}" if code < 0 else f"with exit status {code}"
        return Lost(f"crashed {how}{said}")

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, self._log):
            if stream is not None:
                stream.close()
