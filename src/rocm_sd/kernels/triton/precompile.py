"""Every kernel variant that a model needs, compiled side by side before the model runs.

    start()                                  # early: the compiling process starts while other work is done
    with precompiling() as done:
        unet(...)                            # the result is garbage: what is not compiled yet is not launched
    print(done)                              # how many, and how long it took

Inside the block a launch of a variant that is not compiled yet is noted and skipped, so that one pass names all that
the model needs; leaving the block waits for them. Only kernels of this project are skipped, and only where the thread
that opened the block launches them. Errors are counted, not raised: the real launch meets them again.

Triton 3.6 compiles a variant in 0.33 s and holds Python's lock for 0.07 s of that, so threads alone are at most five
times as fast as one. Therefore a process imports Triton and the kernels once and forks itself for each variant; what a
fork compiles lands in Triton's cache on disk, from which this process loads it in a millisecond. A process that is
missing, dies or writes elsewhere costs time and nothing else: a thread compiles the variant then.
"""

from __future__ import annotations

import atexit
import importlib
import json
import logging
import os
import pkgutil
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as TooLate
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.cache import triton_key

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Precompiled", "precompiling", "serve", "skips_launches", "start"]

log = logging.getLogger("rocm_sd")

OURS = "rocm_sd.kernels.triton"
# A model has 50 to 90 variants: with more workers than this the slowest few decide.
MOST_WORKERS = 32
# The slowest variant met takes 2 s on one core; a process that is silent for so long is given up.
ANSWER_S = 60.0
IDLE_S = 60.0
_SERVE = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {OURS}.precompile import serve; serve()"


@dataclass
class Precompiled:
    """`compiled` and `failed` count variants; `in_process` are those among the former that no thread had to compile."""

    compiled: int = 0
    in_process: int = 0
    failed: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.compiled} kernel variants compiled in {self.seconds:.1f} s{failed}"


def _cores() -> int:
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable else os.cpu_count() or 1


class _CompilingProcess:
    """Asks the process that `serve` runs in. Each question is a line of JSON, each answer a number and a word."""

    def __init__(self) -> None:
        environment = {**os.environ, "TRITON_CACHE_DIR": str(knobs.cache.dir), "OMP_NUM_THREADS": "1"}
        self._asked: dict[int, Future[bool]] = {}
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

    def compile(self, question: dict[str, Any]) -> bool:
        """Whether the variant now lies in Triton's cache."""
        answer: Future[bool] = Future()
        with self._lock:
            self._number += 1
            self._asked[self._number] = answer
            line = json.dumps({**question, "number": self._number}).encode() + b"\n"
            try:
                assert self._process.stdin is not None
                self._process.stdin.write(line)
                self._process.stdin.flush()
            except (OSError, ValueError):
                return False
        if not self.usable():
            return False
        try:
            return answer.result(ANSWER_S)
        except TooLate:
            self._process.kill()
            return False

    def _read(self) -> None:
        assert self._process.stdout is not None
        # Half a second of hashing, and a module in C: done before the first answer, not by every thread that gets one.
        triton_key()
        with suppress(Exception):
            _ = driver.active
        for line in self._process.stdout:
            number, word = line.split()
            with self._lock:
                answer = self._asked.pop(int(number))
            answer.set_result(word == b"compiled")
        # The process has ended: every question that is still open is answered by a thread.
        self._process.wait()
        with self._lock:
            left, self._asked = self._asked, {}
        for answer in left.values():
            answer.set_result(False)

    def close(self) -> None:
        if self._owner == os.getpid() and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
            self._process.kill()


_process: _CompilingProcess | None = None
_process_lock = threading.Lock()


def start() -> None:
    """Start the compiling process, if none is there, without waiting for it; the first block would start it else."""
    global _process  # noqa: PLW0603 -- one for all blocks and threads of this process
    # Without fork, without a cache to hand results over by, or with one core there is nothing to be had from it; and
    # the executable of a frozen program is the program.
    frozen = not sys.executable or getattr(sys, "frozen", False)
    if frozen or not hasattr(os, "fork") or knobs.compilation.always_compile or _cores() < 2:
        return
    with _process_lock:
        if _process is not None and _process.usable():
            return
        try:
            _process = _CompilingProcess()
            atexit.register(_process.close)
        except OSError as error:
            log.debug("kernels are compiled in threads, because no process could be started: %s", error)


class _Hook:
    """Triton has one hook for all threads: it serves every open block, and hands all else to the hook before it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, list[_Block]] = {}
        self._before: Any = None

    def __call__(self, *, fn: Any, compile: dict[str, Any], is_manual_warmup: bool, **rest: Any) -> bool:  # noqa: A002
        blocks = self._open.get(threading.get_ident())
        if blocks and fn.module.startswith(OURS) and not is_manual_warmup:
            blocks[-1].take(fn.jit_function, compile)
            return True
        before = self._before
        return bool(before and before(fn=fn, compile=compile, is_manual_warmup=is_manual_warmup, **rest))

    def is_serving(self) -> bool:
        return bool(self._open.get(threading.get_ident()))

    @contextmanager
    def serving(self, block: _Block) -> Iterator[None]:
        thread = threading.get_ident()
        with self._lock:
            if knobs.runtime.jit_cache_hook is not self and not self._open:
                self._before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, self
            self._open.setdefault(thread, []).append(block)
        try:
            yield
        finally:
            with self._lock:
                self._open[thread].remove(block)
                if not self._open[thread]:
                    del self._open[thread]
                # A hook that another put over this one since then is theirs to take off.
                if not self._open and knobs.runtime.jit_cache_hook is self:
                    self._before, knobs.runtime.jit_cache_hook = None, self._before


_HOOK = _Hook()


def skips_launches() -> bool:
    """Whether this thread is inside a block: what it computes is garbage."""
    return _HOOK.is_serving()


@dataclass(eq=False)
class _Block:
    pool: ThreadPoolExecutor
    done: Precompiled
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _wanted: set[tuple[int, int, str]] = field(default_factory=set)
    _launchers: set[tuple[Any, ...]] = field(default_factory=set)

    def take(self, kernel: Any, compile: dict[str, Any]) -> None:  # noqa: A002 -- Triton's name
        variant = (id(kernel), compile["device"], str(compile["key"]))
        if variant not in self._wanted:
            self._wanted.add(variant)
            target = driver.active.get_current_target()
            question = {
                "module": kernel.__module__,
                "kernel": kernel.__name__,
                # Of Triton 3.6 it depends on which kernel is asked first: here and there that is the order of launches.
                "source": kernel.cache_key,
                "target": (target.backend, target.arch, target.warp_size),
                "variant": compile["specialization_data"],
            }
            self.pool.submit(self._compile, kernel, compile["device"], question)

    def _compile(self, kernel: Any, device: int, question: dict[str, Any]) -> None:
        process = _process
        try:
            # A new thread is on the first GPU, whichever the model is on.
            driver.active.set_current_device(device)
            in_process = process is not None and process.usable() and process.compile(question)
            self._build_launcher(kernel.preload(question["variant"]))
        except Exception as error:  # noqa: BLE001 -- whatever a compiler raises, the real launch raises again
            log.debug("%s: a variant could not be compiled ahead: %s", kernel.__name__, error)
            with self._lock:
                self.done.failed += 1
        else:
            with self._lock:
                self.done.compiled += 1
                self.done.in_process += in_process

    def _build_launcher(self, compiled: Any) -> None:
        """Up to Triton 3.6 each signature has a launcher in C, for which the first launch would wait half a second."""
        signature = (compiled.src.fn, *compiled.src.signature.items())
        with self._lock:
            known = signature in self._launchers
            self._launchers.add(signature)
        if not known:
            # Not kernel.run: that fills in the kernel's handles one by one, while another thread may launch it.
            driver.active.launcher_cls(compiled.src, compiled.metadata)


@contextmanager
def precompiling(workers: int | None = None, *, forks: bool = True) -> Iterator[Precompiled]:
    """Skip launches of what is not compiled, and compile it in up to `workers` forks or threads (a core each).

    Without `forks` threads compile: for the few variants of a process that is a worker itself.
    """
    done = Precompiled()
    count = min(_cores(), MOST_WORKERS) if workers is None else workers
    if count < 2:
        # Nothing runs side by side: the model may as well compile as it goes.
        yield done
        return
    began = time.monotonic()
    if forks:
        start()
    pool = ThreadPoolExecutor(count, thread_name_prefix="rocm-sd-precompile")
    block = _Block(pool, done)
    try:
        with _HOOK.serving(block):
            yield done
        pool.shutdown(wait=True)
    finally:
        # After an error, what has not begun is not begun any more.
        pool.shutdown(wait=True, cancel_futures=True)
        done.seconds = time.monotonic() - began


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
    forks: dict[int, int] = {}
    pending = b""
    while True:
        ready, _, _ = select.select([0, wake], [], [], IDLE_S)
        if wake in ready:
            os.read(wake, 4096)
            for number, word in _ended(forks):
                os.write(answers, f"{number} {word}\n".encode())
        if 0 in ready:
            read = os.read(0, 1 << 16)
            if not read:
                return
            *lines, pending = (pending + read).split(b"\n")
            for line in lines:
                question = json.loads(line)
                kernel = _aimed(question)
                fork = os.fork()
                if fork == 0:
                    _compile_and_exit(kernel, question["variant"])
                forks[fork] = question["number"]
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


def _ended(forks: dict[int, int]) -> Iterator[tuple[int, str]]:
    while forks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        yield forks.pop(pid), "compiled" if status == 0 else "failed"


def _compile_and_exit(kernel: Any, variant: str) -> None:
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if kernel is not None:
            kernel.preload(variant)
            status = 0
    finally:
        # Not sys.exit: what the process registered to be done at its end is not this fork's to do.
        os._exit(status)
