"""Who answers a check's questions: the machine at hand, each probe in a process of its own, or a recorded machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from rocm_sd.doctor.check import CannotRun

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["PATIENCE_S", "LiveProbes", "RecordedProbes"]

# A probe is bounded to 20 s on a healthy GPU. A first convolution that MIOpen searches for may take minutes, which is
# what its check wants to know; ten times that is not worth waiting for.
PATIENCE_S = 180.0
_MODULE = "rocm_sd.doctor.probing"


class LiveProbes:
    """`python -m rocm_sd.doctor.probing NAME ARGUMENTS` in a process of its own, whose end costs one answer.

    `answers` keeps what was told, under the probe's name, so that it is asked once and can be recorded.
    """

    def __init__(self, *, quick: bool = False, patience: float = PATIENCE_S, module: str = _MODULE) -> None:
        self.answers: dict[str, dict[str, Any]] = {}
        self._quick = quick
        self._patience = patience
        self._module = module
        self._asked: dict[str, dict[str, Any]] = {}

    def ask(self, name: str, **arguments: Any) -> Mapping[str, Any]:
        if self._quick:
            arguments.setdefault("quick", True)
        text = json.dumps(arguments, sort_keys=True)
        question = f"{name} {text}"
        if question not in self._asked:
            try:
                self._asked[question] = self._run(name, text)
            except CannotRun as reason:
                self._asked[question] = {"cannot": str(reason)}
            self.answers[name] = self._asked[question]
        return _answer(self._asked[question])

    def _run(self, name: str, arguments: str) -> dict[str, Any]:
        command = [sys.executable, "-m", self._module, name, arguments]
        running = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # A group of its own, so that compilers which it started end with it.
            start_new_session=True,
        )
        try:
            told, errors = running.communicate(timeout=self._patience)
        except subprocess.TimeoutExpired:
            _end(running)
            raise CannotRun(f"the probe {name} did not answer within {self._patience:.0f} s") from None
        except BaseException:
            _end(running)
            raise
        if running.returncode != 0:
            raise CannotRun(f"the probe {name} {_ending(running.returncode)}{_last_line(errors)}")
        return _read(name, told)


class RecordedProbes:
    """The answers of a recorded machine: {"name of the probe": {answer}}."""

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self._answers = answers

    def ask(self, name: str, **_arguments: Any) -> Mapping[str, Any]:
        if name not in self._answers:
            raise CannotRun(f"the answer of the probe {name} was not recorded")
        answer = self._answers[name]
        if not isinstance(answer, dict):
            raise CannotRun(f"the recorded answer of the probe {name} is not an object")
        return _answer(answer)


def _answer(told: dict[str, Any]) -> Mapping[str, Any]:
    if "cannot" in told:
        raise CannotRun(str(told["cannot"]))
    return told


def _read(name: str, told: str) -> dict[str, Any]:
    """Drivers print to standard output, too: the answer is the last line."""
    lines = told.strip().splitlines()
    if not lines:
        raise CannotRun(f"the probe {name} ended without an answer")
    try:
        answer = json.loads(lines[-1])
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise CannotRun(f"the answer of the probe {name} could not be read: {lines[-1][:80]!r}")
    return answer


def _end(running: subprocess.Popen[str]) -> None:
    if hasattr(os, "killpg"):
        os.killpg(running.pid, signal.SIGKILL)
    else:
        running.kill()
    try:
        running.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        # A process that waits inside a hung driver cannot be ended: it is left behind, and the examination goes on.
        return


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"crashed ({signal.Signals(-code).name})"
    except ValueError:
        return f"crashed (signal {-code})"


def _last_line(errors: str) -> str:
    lines = errors.strip().splitlines()
    return f": {lines[-1][:200]}" if lines else ""
