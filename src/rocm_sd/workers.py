"""Worker processes: each runs one function at a time, in so many seconds. One that crashes or hangs costs that call.

    with Worker() as worker:
        worker.call(tasks.build, op, arch, timeout=60)

    Pool(4).submit(tasks.build, op, arch, timeout=60)      # a future; as many workers as are needed, at most four

    with shared() as worker:                               # one for all that this process has to try out
        worker.call(trials.judge, op, trial, timeout=10)

A worker is a new interpreter and never a fork, which could not use a GPU that this process has opened; nor does it run
the user's script again, as those of `multiprocessing` do. Its environment is its own: Triton reads TRITON_INTERPRET
when a kernel is decorated, so compiling and interpreting cannot share a process.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import multiprocessing
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from rocm_sd.errors import RocmSdError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = [
    "OutOfTime", "Pool", "Worker", "WorkerCannotStart", "WorkerFailed", "WorkerLost", "cancelling", "inside", "serve",
    "shared", "start_shared",
]  # fmt: skip

T = TypeVar("T")
_SERVE = f"import sys; from {__name__} import serve; serve(int(sys.argv[1]), sys.argv[3:], program=sys.argv[2] == '1')"
_SETTINGS = "ROCM_SD_"
_START_S = 300.0  # to import torch and Triton takes seconds; many processes on a slow disk take longer
_END_S = 5.0
# A model's first call asks for all that it needs within seconds; what is idle for longer holds memory of the card.
_IDLE_S = 60.0
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


class Worker(AbstractContextManager["Worker"]):
    """One process, started at the first call, and anew after it was lost. As a context it ends with the block.

    `environment`: variables that the process has in place of this one's; None means that it has none. The variable
    `folder` names an empty folder, which is removed with the process. `imports`: modules that it imports as soon as it
    is there, while nobody waits for it yet. `program`: what it runs is no trial, but a program like the user's own: it
    counts as none of these processes, and starts workers for its trials.
    """

    def __init__(
        self,
        environment: Mapping[str, str | None] = MappingProxyType({}),
        *,
        folder: str | None = None,
        imports: Sequence[str] = (),
        program: bool = False,
    ) -> None:
        self._environment, self._folder, self._imports, self._program = environment, folder, imports, program
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any] | None = None
        self._log: Any = None
        self._resources = ExitStack()
        self._ended = self._is_up = False

    def __exit__(self, *_: object) -> None:
        self.stop()

    def call(self, function: Callable[..., T], *arguments: Any, timeout: float, within: float = math.inf) -> T:
        """The value of function(*arguments). The function is one of a module; arguments and value can be pickled.

        It has `timeout` seconds from when its module is imported: `WorkerLost` where they are not enough. `within` are
        all that the caller has, the start of a process included: `OutOfTime`. Errors of this project are raised as
        they are, and others as `WorkerFailed`: the process lives on.
        """
        try:
            answer = self._answer(function, arguments, timeout, time.monotonic() + within)
        except BaseException:
            # Also when the user stops the caller: an answer that comes later would be taken for the next one's.
            self.stop()
            raise
        if isinstance(answer, RocmSdError):
            raise answer
        value: T = answer[0]
        return value

    def start(self) -> None:
        """Start the process, where none runs; the first call would start it else. It ends with this thread."""
        if self._process is not None and self._process.poll() is not None:
            self.stop()
        if self._process is None:
            self._start()

    def stop(self) -> None:
        """End the process; the next call starts another."""
        self._resources.close()
        self._process = self._connection = None
        self._is_up = False

    def end(self) -> None:
        """Kill the process, from any thread and for good: the call that waits for it, and all after, are lost."""
        self._ended = True
        process = self._process
        if process is not None:
            process.kill()

    def _start(self) -> Connection[Any, Any]:
        if self._ended:
            raise WorkerLost("was ended with its pool")
        if not sys.executable or getattr(sys, "frozen", False):
            raise WorkerCannotStart("a frozen program has no interpreter to start")
        resources = self._resources
        # Packages are found where this process found them, and not in the folder that it was started in.
        places = os.pathsep.join(place for place in sys.path if place)
        changed = {**os.environ, "PYTHONPATH": places, "PYTHONSAFEPATH": "1", **self._environment}
        if self._folder is not None:
            changed[self._folder] = resources.enter_context(
                tempfile.TemporaryDirectory(prefix="rocm-sd-worker-", ignore_cleanup_errors=True)
            )
        self._log = resources.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 -- it is one
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            self._connection = resources.enter_context(ours)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _SERVE, str(theirs.fileno()), str(int(self._program)), *self._imports],
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                    env={name: value for name, value in changed.items() if value is not None},
                    pass_fds=(theirs.fileno(),),
                )
            except OSError as error:
                self.stop()
                raise WorkerCannotStart(f"no process could be started: {error}") from error
        resources.callback(self._process.wait)
        resources.callback(self._process.kill)
        return ours

    def _answer(self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float, end: float) -> Any:
        if self._process is not None and self._process.poll() is not None:
            # It died after its last answer, which is no fault of this function.
            self.stop()
        is_up = self._is_up
        try:
            connection = self._connection or self._start()
            # Two messages: to read the second, the process imports the module.
            settings = {name: value for name, value in os.environ.items() if name.startswith(_SETTINGS)}
            connection.send((sys.path, settings))
            connection.send((function, arguments))
            answer = _received(connection, _START_S, end)
            if answer is None:
                is_up = self._is_up = True
                answer = _received(connection, timeout, end)
        except TimeoutError as late:
            reason = str(late)
        except (EOFError, ConnectionError):
            reason = self._ending()
        else:
            return answer
        raise (WorkerLost if is_up else WorkerCannotStart)(reason)

    def _ending(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        said = f"; it last said: {lines[-1][:200]}" if lines else ""
        return f"crashed {f'by signal {-code}' if code < 0 else f'with exit status {code}'}{said}"


def _received(connection: Connection[Any, Any], limit: float, end: float) -> Any:
    left = end - time.monotonic()
    if connection.poll(max(0.0, min(limit, left))):
        return connection.recv()
    raise OutOfTime if left < limit else TimeoutError(f"hung: stopped after {limit:.3g} s without an answer")


class Pool(AbstractContextManager["Pool"]):
    """At most `size` workers (as many as cores), each started when it is first needed and reused until `close`."""

    def __init__(
        self,
        size: int | None = None,
        environment: Mapping[str, str | None] = MappingProxyType({}),
        *,
        folder: str | None = None,
        program: bool = False,
    ) -> None:
        self.size = size or os.cpu_count() or 1
        self._make = partial(Worker, environment, folder=folder, program=program)
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[Worker], Any]] | None] = queue.SimpleQueue()
        self._threads: dict[threading.Thread, Worker] = {}
        self._under_way = 0
        self._closed = False
        self._lock = threading.Lock()

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, function: Callable[..., T], *arguments: Any, timeout: float) -> Future[T]:
        """`Worker.call` by the next worker that is free."""
        return self.lend(lambda worker: worker.call(function, *arguments, timeout=timeout))

    def lend(self, job: Callable[[Worker], T]) -> Future[T]:
        """Several calls of one worker, which keeps what its functions keep: job(worker), in a thread of the pool."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise WorkerLost("its pool is closed")
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
        with self._lock:
            self._closed = True
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


class _Keeper:
    """The worker of `shared`. A process dies with the thread that started it, so one thread keeps it while it lives."""

    def __init__(self) -> None:
        self.worker, self.owner, self.ended = Worker(), os.getpid(), False
        self.lock = threading.RLock()
        self.used = time.monotonic()
        self._wanted: queue.SimpleQueue[Future[None]] = queue.SimpleQueue()
        threading.Thread(target=self._keep, daemon=True, name="rocm-sd-shared-worker").start()

    def start(self) -> None:
        started: Future[None] = Future()
        self._wanted.put(started)
        started.result()

    def _keep(self) -> None:
        while not self.ended:
            try:
                started = self._wanted.get(timeout=max(0.01, self.used + _IDLE_S - time.monotonic()))
            except queue.Empty:
                self._end_if_idle()
                continue
            try:
                self.worker.start()
                started.set_result(None)
            except BaseException as error:  # noqa: BLE001 -- whoever waits for it raises it
                started.set_exception(error)

    def _end_if_idle(self) -> None:
        if self.lock.acquire(blocking=False):
            try:
                if time.monotonic() - self.used >= _IDLE_S:
                    self.ended = True
                    self.worker.stop()
            finally:
                self.lock.release()


_keeper: _Keeper | None = None
_keeper_lock = threading.Lock()


def _kept() -> _Keeper:
    """A fork of this process has the object, and neither its thread nor a right to its worker."""
    global _keeper  # noqa: PLW0603 -- one for all of this process
    with _keeper_lock:
        if _keeper is None or _keeper.ended or _keeper.owner != os.getpid():
            if _keeper is None:
                atexit.register(_end_shared)
            _keeper = _Keeper()
        return _keeper


def _end_shared() -> None:
    if _keeper is not None and _keeper.owner == os.getpid():
        _keeper.worker.end()


@contextmanager
def shared() -> Iterator[Worker]:
    """The one worker for all that this process tries out, with what it has imported; one thread at a time has it.

    It ends with this process, or after a minute in which nobody asked, so that its memory of the card is given back.
    Inside a worker there is none: what would be tried out in one is tried in place.
    """
    if inside():
        raise WorkerCannotStart("a worker starts no other")
    while True:
        kept = _kept()
        with kept.lock:
            if kept.ended:
                continue
            kept.start()
            try:
                yield kept.worker
            finally:
                kept.used = time.monotonic()
            return


def start_shared(function: Callable[..., object], *arguments: Any) -> None:
    """Start the shared worker without waiting for it, and let it call the function, which imports what it will need."""

    def begin() -> None:
        # Who needs the worker meets the fault again.
        with suppress(WorkerFailed), shared() as worker:
            worker.call(function, *arguments, timeout=_START_S)

    threading.Thread(target=begin, daemon=True, name="rocm-sd-start-worker").start()


@contextmanager
def cancelling(futures: Iterable[Future[Any]]) -> Iterator[None]:
    """Where the block ends by an error or Ctrl-C, what has not begun is not begun any more."""
    try:
        yield
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def serve(descriptor: int, imports: Iterable[str] = (), *, program: bool = False) -> None:
    """What a worker process runs: a function at a time, until nobody asks any more."""
    global _inside  # noqa: PLW0603 -- of this process for good
    _inside = not program
    # One that hangs would outlive a parent that was killed, and hold the card: PR_SET_PDEATHSIG.
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
    if prctl is not None:
        prctl(1, signal.SIGKILL)
    # Ctrl-C is for the process that asks, which then ends this one; else a function would seem to have crashed.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(descriptor)
    for name in imports:
        # The function that needs it meets the fault again, and says it.
        with suppress(Exception):
            import_module(name)
    while True:
        try:
            places, settings = connection.recv()
        except EOFError:
            return
        sys.path += [place for place in places if place not in sys.path]
        for name in [name for name in os.environ if name.startswith(_SETTINGS)]:
            del os.environ[name]
        os.environ.update(settings)
        connection.send_bytes(_answer(connection))


def _answer(connection: Connection[Any, Any]) -> bytes:
    """None says that the function begins: before that comes an error only where its module cannot be imported."""
    try:
        function, arguments = connection.recv()
        connection.send(None)
        return pickle.dumps((function(*arguments),))
    except RocmSdError as error:
        return pickle.dumps(error)
    except Exception as error:  # noqa: BLE001 -- whatever a compiler raises is the answer, and the process lives on
        traceback.print_exc()
        return pickle.dumps(WorkerFailed(f"{type(error).__name__}: {error}"))
