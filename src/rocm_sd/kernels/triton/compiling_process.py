"""The process that compiles variants of kernels, a fork for each: who asks it, and what runs in it.

It imports Triton and the kernels once. What a fork compiles lands in Triton's cache on disk. A fork that raises or
crashes says so by how it ends; what its compiler wrote goes with the answer, and never to the user's terminal.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import select
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from typing import IO, TYPE_CHECKING, Any

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.cache import triton_key

from rocm_sd.kernels.triton import sentence

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["COMPILED", "CRASHED", "ENDED", "FAILED", "HERE", "OURS", "Answer", "CompilingProcess", "serve"]

OURS = "rocm_sd.kernels.triton"
# The slowest variant met takes 2 s on one core; a process that is silent for so long is given up.
ANSWER_S = 60.0
IDLE_S = 60.0
# Of what a compiler writes, the end: a module of MLIR has megabytes.
MOST_SAID = 4000
_SERVE = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {__name__} import serve; serve()"
# How a question ended: the variant lies in Triton's cache; the compiler raised; it crashed; it was ended from outside,
# or nobody answers; or the fork could do nothing about it, and this process may.
COMPILED, FAILED, CRASHED, ENDED, HERE = "compiled", "failed", "crashed", "ended", "here"
# What a fork exits with.
_STATUS = {0: COMPILED, 1: FAILED, 2: HERE}
# Sent by the system where memory runs out, or by a person.
_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP} if os.name == "posix" else ())


@dataclass(frozen=True)
class Answer:
    """`why` is one line; `said` is what the compiler wrote to its standard error."""

    word: str
    why: str = ""
    said: str = ""


class CompilingProcess:
    """Asks the process that `serve` runs in. Each question is a line of JSON, and so is each answer."""

    def __init__(self) -> None:
        environment = {**os.environ, "TRITON_CACHE_DIR": str(knobs.cache.dir), "OMP_NUM_THREADS": "1"}
        self._asked: dict[int, Future[Answer]] = {}
        self._lock = threading.Lock()
        self._number = 0
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            # Ctrl-C is for this process; the other one ends when its standard input does.
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True, name="rocm-sd-precompile").start()

    def usable(self) -> bool:
        # A fork of this process has the object, and no thread that reads answers.
        return self._owner == os.getpid() and self._process.poll() is None

    def compile(self, question: dict[str, Any]) -> Answer:
        answer: Future[Answer] = Future()
        with self._lock:
            self._number += 1
            self._asked[self._number] = answer
            line = json.dumps({**question, "number": self._number}).encode() + b"\n"
            try:
                assert self._process.stdin is not None
                self._process.stdin.write(line)
                self._process.stdin.flush()
            except (OSError, ValueError):
                # It is gone, and must not be taken for one that lives when the next is wanted.
                self._process.kill()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(1)
                return Answer(ENDED)
        if not self.usable():
            return Answer(ENDED)
        try:
            return answer.result(ANSWER_S)
        except TooLate:
            # Another would take as long; those that only waited beside it are asked again.
            self._process.kill()
            return Answer(FAILED, f"its compiler did not end in {ANSWER_S:.0f} s")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            with self._lock:
                answer = self._asked.pop(told.pop("number"))
            answer.set_result(Answer(**told))
        # The process has ended: every question that is still open is for the next one.
        self._process.wait()
        with self._lock:
            left, self._asked = self._asked, {}
        for answer in left.values():
            answer.set_result(Answer(ENDED))

    def close(self) -> None:
        if self._owner == os.getpid() and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
            self._process.kill()


class _NoDevice:
    """Stands for Triton's driver where there is a target and no GPU is touched."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


def serve() -> None:
    """What the compiling process runs, in one thread: reads questions, forks for each, tells how it ended."""
    answers = os.dup(1)
    # Compilers write to standard output from C++.
    os.dup2(2, 1)
    _get_ready()
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    forks: dict[int, tuple[int, IO[bytes]]] = {}
    pending = b""
    while True:
        ready, _, _ = select.select([0, wake], [], [], IDLE_S)
        if wake in ready:
            os.read(wake, 4096)
            for number, answer in _ended(forks):
                os.write(answers, json.dumps({"number": number, **asdict(answer)}).encode() + b"\n")
        if 0 in ready:
            read = os.read(0, 1 << 16)
            if not read:
                return
            *lines, pending = (pending + read).split(b"\n")
            for line in lines:
                question = json.loads(line)
                kernel = _aimed(question)
                written = _file()
                fork = os.fork()
                if fork == 0:
                    _compile_and_exit(kernel, question["variant"], written)
                forks[fork] = question["number"], written
        if not ready and not forks:
            return


def _get_ready() -> None:
    """Do once what every fork would have to do for itself: imports, and half a second's hashing of Triton's files."""
    triton_key()
    package = importlib.import_module(OURS)
    for module in pkgutil.iter_modules(package.__path__, OURS + "."):
        importlib.import_module(module.name)


@triton.jit
def _nothing(x):
    tl.store(x, 0.0)


@cache
def _warm_up(target: GPUTarget) -> None:
    """The first compilation takes 0.1 s more than any other, here once and not in every fork."""
    with suppress(Exception):
        triton.compile(ASTSource(_nothing, {"x": "*fp32"}, {}, {}), target=target)


def _aimed(question: dict[str, Any]) -> Any:
    """The kernel, with Triton set to compile for the target; None where the source here is another than there."""
    target = GPUTarget(*question["target"])
    driver.set_active(_NoDevice(target))
    _warm_up(target)
    kernel = getattr(importlib.import_module(question["module"]), question["kernel"], None)
    return kernel if kernel is not None and kernel.cache_key == question["source"] else None


def _ended(forks: dict[int, tuple[int, IO[bytes]]]) -> Iterator[tuple[int, Answer]]:
    while forks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        number, written = forks.pop(pid)
        with written:
            yield number, _answer(status, _tail(written))


def _file() -> IO[bytes]:
    """In memory where the system has such files: a disk that is full must not end the process."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("rocm-sd-compiler"), "w+b")
    return tempfile.TemporaryFile()


def _tail(written: IO[bytes]) -> str:
    written.seek(max(0, written.seek(0, os.SEEK_END) - MOST_SAID))
    return written.read().decode(errors="replace").strip()


def _answer(status: int, said: str) -> Answer:
    """How a fork ended, by the status that the system has of it."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        why = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        return Answer(ENDED if number in _FROM_OUTSIDE else CRASHED, why, said)
    word = _STATUS.get(os.WEXITSTATUS(status), CRASHED)
    if word == FAILED:
        return Answer(word, said.splitlines()[-1] if said else "", said)
    return Answer(word, f"exit status {os.WEXITSTATUS(status)}" if word == CRASHED else "", said)


def _compile_and_exit(kernel: Any, variant: str, written: IO[bytes]) -> None:
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(written.fileno(), 2)
        if kernel is None:
            # The source there is another than here.
            status = 2
        else:
            kernel.preload(variant)
            status = 0
    except OSError as error:
        # Of the cache, and no fault of the compiler.
        os.write(2, f"\n{sentence(error)}\n".encode())
        status = 2
    except BaseException as error:  # noqa: BLE001 -- told by the last line
        os.write(2, f"\n{sentence(error)}\n".encode())
    finally:
        # Not sys.exit: what the process registered to be done at its end is not this fork's to do.
        os._exit(status)
