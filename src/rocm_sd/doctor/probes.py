"""Who answers a check's questions: the machine at hand, each probe in a process of its own, or a recorded machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from rocm_sd.doctor.check import CannotRun
from rocm_sd.doctor.probing.isolated import ending

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["PATIENCE_S", "LiveProbes", "RecordedProbes", "answer_of"]

# A probe is bounded to 20 s on a healthy GPU. A first convolution that MIOpen searches for may take minutes, which is
# what its check wants to know; ten times that is not worth waiting for.
PATIENCE_S = 180.0
_MODULE = "rocm_sd.doctor.probing"


class LiveProbes:
    """`python -m rocm_sd.doctor.probing NAME ARGUMENTS` in a process of its own, whose end costs one answer.

    `answers` keeps them under the probe's name, so that it is asked once and can be recorded.
    """

    def __init__(self, *, quick: bool = False, patience: float = PATIENCE_S, module: str = _MODULE) -> None:
        self.answers: dict[str, dict[str, Any]] = {}
        self._arguments = json.dumps({"quick": True} if quick else {})
        self._patience = patience
        self._module = module

    def ask(self, name: str) -> Mapping[str, Any]:
        if name not in self.answers:
            try:
                asked = [self._module, name, self._arguments]
                self.answers[name] = answer_of(f"the probe {name}", asked, self._patience)
            except CannotRun as reason:
                self.answers[name] = {"cannot": str(reason)}
        return _answer(self.answers[name])


class RecordedProbes:
    """The answers of a recorded machine: {"name of the probe": {answer}}."""

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self._answers = answers

    def ask(self, name: str) -> Mapping[str, Any]:
        if name not in self._answers:
            raise CannotRun(f"the answer of the probe {name} was not recorded")
        answer = self._answers[name]
        if not isinstance(answer, dict):
            raise CannotRun(f"the recorded answer of the probe {name} is not an object")
        return _answer(answer)


def _answer(given: dict[str, Any]) -> Mapping[str, Any]:
    if "cannot" in given:
        raise CannotRun(str(given["cannot"]))
    return given


def answer_of(
    who: str, module: Sequence[str], patience: float, *, python: str | None = None, folder: Path | None = None
) -> dict[str, Any]:
    """What `python -m MODULE ARGUMENTS` prints last, one JSON object; or CannotRun with the reason, in words.

    `who` is asked: "the probe smoke". `python` is another interpreter, `folder` where it is started.
    """
    running = subprocess.Popen(
        [python or sys.executable, "-m", *module],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # A group of its own, so that compilers which it started end with it.
        start_new_session=True,
    )
    try:
        printed, errors = running.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        _end(running)
        raise CannotRun(f"{who} did not answer within {patience:.0f} s") from None
    except BaseException:
        _end(running)
        raise
    if running.returncode != 0:
        raise CannotRun(f"{who} {ending(running.returncode)}{_last_line(errors)}")
    # Drivers print to standard output, too: the answer is the last line.
    lines = printed.strip().splitlines()
    if not lines:
        raise CannotRun(f"{who} ended without an answer")
    try:
        answer = json.loads(lines[-1])
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise CannotRun(f"the answer of {who} could not be read: {lines[-1][:80]!r}")
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


def _last_line(errors: str) -> str:
    lines = errors.strip().splitlines()
    return f": {lines[-1][:200]}" if lines else ""
