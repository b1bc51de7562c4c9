"""Worker processes: each runs one function at a time, in so many seconds. One that crashes or hangs costs that call.

    with Worker() as worker:
        worker.call(tasks.build, {"op": "geglu"}, timeout=60)

    Pool(4).submit(tasks.build, {"op": "geglu"}, timeout=60)      # a future; as many workers as are needed, at most 4

A worker is a new interpreter and never a fork, which could not use a GPU that this process has opened. Its environment
is its own: Triton reads TRITON_INTERPRET when a kernel is decorated, so compiling and interpreting cannot share a
process. Requests and answers are lines of JSON.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import os
import queue
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from rocm_sd.errors import RocmSdError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

__all__ = [
    "OutOfTime", "Pool", "Worker", "WorkerCannotStart", "WorkerFailed", "WorkerLost", "cancelling", "inside", "serve",
]  # fmt: skip

T = TypeVar("T")
_SERVE = f"from {__name__} import serve; serve()"
_START_S = 300.0  # to import torch and Triton takes seconds; many processes on a slow disk take longer
_END_S = 5.0
_BEGUN = b'"begun"'
_inside = False


class WorkerFailed(RocmSdError):
    """A function raised an error of another project: Triton's, clang's or Python's."""


class WorkerLost(WorkerFailed):
    """A function that did not end: its process crashed, or was stopped after the time allowed."""


class WorkerCannotStart(WorkerFailed):
    """The process ended before the function began: a fault of the installation."""


class OutOfTime(Exception):
    """The time of the caller was over before that of the function: nothing is known of it."""


def inside() -> bool:
    """True in a worker process, where a function does its work at once instead of starting workers of its own."""
    return _inside


class Worker:
    """One process, started at the first call, and anew after it was lost. Use as a context: the process ends with it.

    `environment`: variables that the process has in place of this one's; None means that it has none. The variable
    `folder` names an empty folder, which is removed with the process.
    """

    def __init__(
        self, environment: Mapping[str, str | None] = MappingProxyType({}), *, folder: str | None = None
    ) -> None:
        self._environment, self._folder = environment, folder
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Any = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._pending = b""
        self._ended = False

    def __enter__(self) -> Worker:  # noqa: PYI034 -- Self came with Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def call(
        self, function: Callable[..., T], arguments: Mapping[str, Any], *, timeout: float, within: float = math.inf
    ) -> T:
        """The value of function(**arguments). The function stands in a module; arguments and value are JSON.

        It has `timeout` seconds from when its module is imported: `WorkerLost` where they are not enough. `within` are
        all that the caller has, the start of a process included: `OutOfTime`. Errors of this project are raised as
        they are, and others as `WorkerFailed`: the process lives on.
        """
        end = time.monotonic() + within
        request = {
            "module": function.__module__,
            "function": function.__qualname__,
            "arguments": dict(arguments),
            "path": sys.path,
            "environment": {name: value for name, value in os.environ.items() if name.startswith("ROCM_SD_")},
        }
        try:
            process = self._process or self._start()
            self._send(process, json.dumps(request).encode())
            answer = json.loads(self._answer(process, timeout, end))
        except BaseException:
            # Also when the user stops the caller: an answer that comes later would be taken for the next one's.
            self.stop()
            raise
        if "error" in answer:
            raise _rebuilt(answer["error"])
        value: T = answer["value"]
        return value

    def stop(self) -> None:
        """End the process; the next call starts another."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, self._log):
            if stream is not None:
                stream.close()
        if self._scratch is not None:
            self._scratch.cleanup()

    def end(self) -> None:
        """Kill the process, from any thread and for good: the call that waits for it, and all after, are lost."""
        self._ended = True
        process = self._process
        if process is not None:
            process.kill()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._ended:
            raise WorkerLost("was ended with its pool")
        # Packages are found where this process found them, and not in the folder that it was started in.
        places = os.pathsep.join(place for place in sys.path if place)
        changed = {**os.environ, "PYTHONPATH": places, "PYTHONSAFEPATH": "1", **self._environment}
        if self._folder is not None:
            self._scratch = tempfile.TemporaryDirectory(prefix="rocm-sd-worker-", ignore_cleanup_errors=True)
            changed[self._folder] = self._scratch.name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 -- lives as long as the process that writes to it
        self._pending = b""
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={name: value for name, value in changed.items() if value is not None},
        )
        return self._process

    def _send(self, process: subprocess.Popen[bytes], line: bytes) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(line + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise self._crashed(process) from None

    def _answer(self, process: subprocess.Popen[bytes], timeout: float, end: float) -> bytes:
        """The first line says that the function has begun, unless its module could not be imported."""
        left = end - time.monotonic()
        try:
            line = self._line(process, min(_START_S, left))
        except WorkerLost as lost:
            raise WorkerCannotStart(lost.message) from None
        if line == _BEGUN:
            left = end - time.monotonic()
            line = self._line(process, min(timeout, left))
            if line is None and left >= timeout:
                raise WorkerLost(f"hung: stopped after {timeout:.3g} s without an answer")
        elif line is None and left >= _START_S:
            raise WorkerCannotStart(f"did not start within {_START_S:.3g} s")
        if line is None:
            raise OutOfTime
        return line

    def _line(self, process: subprocess.Popen[bytes], timeout: float) -> bytes | None:
        """One line of its answers, or None where there is none in so many seconds."""
        assert process.stdout is not None
        end = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                left = end - time.monotonic()
                if left <= 0 or not selector.select(left):
                    return None
                read = os.read(process.stdout.fileno(), 1 << 20)
                if not read:
                    raise self._crashed(process)
                self._pending += read
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _crashed(self, process: subprocess.Popen[bytes]) -> WorkerLost:
        code = process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        said = f"; it last said: {lines[-1][:200]}" if lines else ""
        how = f"by signal {-code}" if code < 0 else f"with exit status {code}"
        return WorkerLost(f"crashed {how}{said}")


def _rebuilt(error: Mapping[str, Any]) -> RocmSdError:
    """The error of a worker as an error here: of the same class where it is one of the project's."""
    kind = getattr(importlib.import_module(error["module"]), error["class"], None) if error["module"] else None
    if not (isinstance(kind, type) and issubclass(kind, RocmSdError)):
        kind = WorkerFailed
    rebuilt = kind.__new__(kind)
    RocmSdError.__init__(rebuilt, error["message"], hint=error["hint"])
    return rebuilt


class Pool:
    """At most `size` workers (as many as cores), each started when it is first needed and reused until `close`."""

    def __init__(
        self,
        size: int | None = None,
        environment: Mapping[str, str | None] = MappingProxyType({}),
        *,
        folder: str | None = None,
    ) -> None:
        self.size = size or os.cpu_count() or 1
        self._make = partial(Worker, environment, folder=folder)
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[Worker], Any]] | None] = queue.SimpleQueue()
        self._threads: dict[threading.Thread, Worker] = {}
        self._under_way = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Pool:  # noqa: PYI034 -- Self came with Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, function: Callable[..., T], arguments: Mapping[str, Any], *, timeout: float) -> Future[T]:
        """`Worker.call` by the next worker that is free."""
        return self.lend(lambda worker: worker.call(function, arguments, timeout=timeout))

    def lend(self, job: Callable[[Worker], T]) -> Future[T]:
        """Several calls of one worker, which keeps what its functions keep: job(worker), in a thread of the pool."""
        future: Future[T] = Future()
        with self._lock:
            self._under_way += 1
            if len(self._threads) < min(self._under_way, self.size):
                worker = self._make()
                # No ThreadPoolExecutor: the exit of this process would wait for its threads.
                thread = threading.Thread(target=self._work, args=(worker,), daemon=True, name="rocm-sd-worker")
                self._threads[thread] = worker
                thread.start()
        self._jobs.put((future, job))
        return future

    def _work(self, worker: Worker) -> None:
        # A process dies with the thread that started it, so each thread keeps its own.
        with worker:
            while (taken := self._jobs.get()) is not None:
                future, job = taken
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(job(worker))
                    except BaseException as error:  # noqa: BLE001 -- the future raises it
                        future.set_exception(error)
                with self._lock:
                    self._under_way -= 1

    def close(self) -> None:
        """End every process: what is under way is lost, and what waits is cancelled."""
        while not self._jobs.empty():
            taken = self._jobs.get()
            if taken is not None:
                taken[0].cancel()
        for worker in self._threads.values():
            worker.end()
            self._jobs.put(None)
        for thread in self._threads:
            # What hangs in a driver cannot even be killed: nobody waits for it.
            thread.join(_END_S)


@contextmanager
def cancelling(futures: Iterable[Future[Any]]) -> Iterator[None]:
    """Where the block ends by an error or Ctrl-C, what has not begun is not begun any more."""
    try:
        yield
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def serve() -> None:
    """What a worker process runs: reads a request a line, and answers with two."""
    global _inside  # noqa: PLW0603 -- of this process for good
    _inside = True
    _die_with_parent()
    # Ctrl-C is for the process that asks, which then ends this one; else a function would seem to have crashed.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Compilers write to standard output from C++; answers get a descriptor of their own.
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            for answer in _answers(json.loads(line)):
                answers.write(answer + b"\n")
                answers.flush()


def _answers(request: dict[str, Any]) -> Iterator[bytes]:
    sys.path += [place for place in request["path"] if place not in sys.path]
    for name in [name for name in os.environ if name.startswith("ROCM_SD_")]:
        del os.environ[name]
    os.environ.update(request["environment"])
    try:
        function = getattr(importlib.import_module(request["module"]), request["function"])
        yield _BEGUN
        yield json.dumps({"value": function(**request["arguments"])}).encode()
    except RocmSdError as error:
        yield _failed(error.message, error.hint, type(error))
    except Exception as error:  # noqa: BLE001 -- whatever a compiler raises is the answer, and the process lives on
        traceback.print_exc()
        yield _failed(f"{type(error).__name__}: {error}")


def _failed(message: str, hint: str | None = None, kind: type[RocmSdError] | None = None) -> bytes:
    module, name = (None, None) if kind is None else (kind.__module__, kind.__qualname__)
    return json.dumps({"error": {"message": message, "hint": hint, "module": module, "class": name}}).encode()


def _die_with_parent() -> None:
    """A worker that hangs would outlive a parent that was killed, and hold the card."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
    if prctl is not None:
        prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
