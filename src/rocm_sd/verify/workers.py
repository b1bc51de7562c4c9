"""A pool of worker processes: one that crashes or hangs costs the one task it had, and is replaced.

Triton reads TRITON_INTERPRET when a kernel is decorated, so compiling and interpreting cannot share a process, and a
pool is asked for by what its workers are to do. Requests and answers are lines of JSON.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import queue
import selectors
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any

from rocm_sd import errors

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Pool", "WorkerFailed", "WorkerLost", "inside", "pool"]


class WorkerFailed(errors.RocmSdError):
    """A task raised an error of another project: Triton's, clang's or Python's."""


class WorkerLost(WorkerFailed):
    """A task that did not end: its process crashed, or was stopped after the time allowed."""


def inside() -> bool:
    """True in a worker process, where a task does its work at once instead of starting workers of its own."""
    specification = getattr(sys.modules.get("__main__"), "__spec__", None)
    return specification is not None and specification.name == "rocm_sd.verify.worker"


class _Worker:
    def __init__(self, interpret: bool) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        if interpret:
            environment["TRITON_INTERPRET"] = "1"
        # Two workers on two cores: threads inside them would only wait for one another.
        environment |= {"OMP_NUM_THREADS": "1", "TRITON_DEFAULT_FP_FUSION": "1", "TRITON_ALWAYS_COMPILE": "1"}
        self._scratch = tempfile.TemporaryDirectory(prefix="rocm-sd-worker-")
        environment["TRITON_CACHE_DIR"] = self._scratch.name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 -- lives as long as the process that writes to it
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rocm_sd.verify.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
        )
        self._pending = b""

    def call(self, request: dict[str, Any], timeout: float) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._crashed() from None
        answer = json.loads(self._line(timeout))
        if "error" in answer:
            raise _rebuilt(answer["error"])
        return answer["value"]

    def _line(self, timeout: float) -> bytes:
        assert self._process.stdout is not None
        end = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                left = end - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise WorkerLost(f"was stopped after {timeout:g} s without an answer")
                read = os.read(self._process.stdout.fileno(), 1 << 20)
                if not read:
                    raise self._crashed()
                self._pending += read
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _crashed(self) -> WorkerLost:
        code = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        said = f"; it last said: {lines[-1]}" if lines else ""
        return WorkerLost(f"crashed with exit status {code}{said}")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                stream.close()
        self._scratch.cleanup()


def _rebuilt(error: Mapping[str, Any]) -> errors.RocmSdError:
    """The error of the worker as an error here: of the same class where it is one of the project's."""
    kind = getattr(importlib.import_module(error["module"]), error["class"], None) if error["ours"] else None
    if not (isinstance(kind, type) and issubclass(kind, errors.RocmSdError)):
        kind = WorkerFailed
    rebuilt = kind.__new__(kind)
    errors.RocmSdError.__init__(rebuilt, error["message"], hint=error["hint"])
    return rebuilt


class Pool:
    """As many workers as cores, started when first needed and reused until this process ends."""

    def __init__(self, *, interpret: bool = False, size: int | None = None) -> None:
        self.size = size or os.cpu_count() or 1
        self._interpret = interpret
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(self.size, thread_name_prefix="rocm-sd-worker")

    def submit(self, function: str, arguments: Mapping[str, Any], *, timeout: float) -> Future[Any]:
        """Call `module:function` with JSON arguments in a worker; the value it returns is JSON too."""
        ours = {name: value for name, value in os.environ.items() if name.startswith("ROCM_SD_")}
        request = {"function": function, "arguments": dict(arguments), "path": sys.path, "environment": ours}
        return self._threads.submit(self._run, request, timeout)

    def _run(self, request: dict[str, Any], timeout: float) -> Any:
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            worker = _Worker(self._interpret)
        try:
            value = worker.call(request, timeout)
        except errors.RocmSdError as error:
            # An error that the worker told of leaves it fit for the next task; silence or death does not.
            if isinstance(error, WorkerLost):
                worker.stop()
            else:
                self._idle.put(worker)
            raise
        except BaseException:
            worker.stop()
            raise
        self._idle.put(worker)
        return value

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        while not self._idle.empty():
            self._idle.get_nowait().stop()


@cache
def pool(*, interpret: bool = False) -> Pool:
    """The pool of this process whose workers run Triton's interpreter, or the one whose workers compile."""
    made = Pool(interpret=interpret)
    atexit.register(made.close)
    return made
