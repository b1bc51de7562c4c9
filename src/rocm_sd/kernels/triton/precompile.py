"""Every kernel variant that a model needs, compiled side by side before the model runs.

    start()                                  # early: the compiling process starts while other work is done
    with precompiling() as done:
        unet(...)                            # the result is garbage: what is not compiled yet is not launched
    print(done)                              # how many, and how long it took
    with noting() as questions:              # the same, and nothing is compiled: another process may ask for it
        unet(...)

Inside the block a launch of a variant that is not compiled yet is noted and skipped, so that one pass names all that
the model needs; leaving the block waits for them. Only kernels of this project are skipped, and only where the thread
that opened the block launches them. Errors are counted, not raised: the real launch meets them again.

A variant that a fork could not compile is not compiled here either: its launch raises `CompilerFailed`, before anything
has run. Where the fork was ended by a signal, the compiler crashed, and it is `CompilerCrashed`. A fork that was killed
from outside proves nothing, and another one tries.

Triton 3.6 compiles a variant in 0.33 s and holds Python's lock for 0.07 s of that, so threads alone are at most five
times as fast as one. Therefore a process imports Triton and the kernels once and forks itself for each variant; what a
fork compiles lands in Triton's cache on disk, from which this process loads it in a millisecond. A process that cannot
be started or writes elsewhere costs time and nothing else: a thread compiles the variant then.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib
import json
import logging
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import triton
from triton import knobs
from triton.runtime import driver
from triton.runtime.cache import triton_key

from rocm_sd.kernels.triton import CompilerCrashed, CompilerFailed
from rocm_sd.kernels.triton.compiling_process import (
    COMPILED,
    CRASHED,
    ENDED,
    FAILED,
    HERE,
    OURS,
    Answer,
    CompilingProcess,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

__all__ = [
    "Precompiled", "compile_variants", "get_ready", "has_compiled", "launching", "noting", "precompiling",
    "skips_launches", "start",
]  # fmt: skip

log = logging.getLogger("rocm_sd")

# A model has 50 to 90 variants: with more workers than this the slowest few decide.
MOST_WORKERS = 32
# How long who stops it may have to wait.
_STOP_S = 0.1
_MARKS = "rocm-sd"


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


_process: CompilingProcess | None = None
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
            _process = CompilingProcess()
            atexit.register(_process.close)
        except OSError as error:
            log.debug("kernels are compiled in threads, because no process could be started: %s", error)


@cache
def get_ready() -> threading.Thread:
    """Half a second of hashing Triton's files, and its driver: begun early, and once for all threads that compile."""

    def read() -> None:
        with suppress(Exception):  # whoever compiles meets it again
            triton_key()
            _ = driver.active

    thread = threading.Thread(target=read, daemon=True, name="rocm-sd-hashing")
    thread.start()
    return thread


def _ask(question: dict[str, Any]) -> Answer:
    """The compiling process, and once more where it or its fork was ended: by the system, which proves nothing."""
    answer = Answer(HERE)
    mark = _mark(question)
    if mark.exists():
        return Answer(COMPILED)
    for _ in range(2):
        start()
        process = _process
        if process is None or not process.usable():
            return answer
        answer = process.compile(question)
        if answer.word != ENDED:
            break
    if answer.word == COMPILED:
        with suppress(OSError):
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
    return answer


_Variant = tuple[int, int, str]


def _variant(kernel: Any, compile: dict[str, Any]) -> _Variant:  # noqa: A002 -- Triton's name
    return id(kernel), compile["device"], str(compile["key"])


class _Hook:
    """Triton has one hook for all threads: it serves every open block, and hands all else to the hook before it.

    Once a variant was refused, it stays: a launch of that variant is an error, and compiles nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, list[Taker]] = {}
        self._refused: dict[_Variant, CompilerFailed] = {}
        self._before: Any = None

    def __call__(self, *, fn: Any, compile: dict[str, Any], is_manual_warmup: bool, **rest: Any) -> bool:  # noqa: A002
        blocks = self._open.get(threading.get_ident())
        if not is_manual_warmup and fn.module.startswith(OURS):
            refused = self._refused.get(_variant(fn.jit_function, compile)) if self._refused else None
            if blocks:
                if refused is None:
                    blocks[-1].take(fn.jit_function, compile)
                return True
            if refused is not None:
                raise type(refused)(refused.message)
        before = self._before
        return bool(before and before(fn=fn, compile=compile, is_manual_warmup=is_manual_warmup, **rest))

    def is_serving(self) -> bool:
        return bool(self._open.get(threading.get_ident()))

    def refuse(self, variant: _Variant, error: CompilerFailed) -> None:
        """From now on: the block that asked for it may have ended, and taken the hook off."""
        with self._lock:
            self._refused[variant] = error
            self._put_on()

    @contextmanager
    def serving(self, block: Taker) -> Iterator[None]:
        thread = threading.get_ident()
        with self._lock:
            if not self._open:
                self._put_on()
            self._open.setdefault(thread, []).append(block)
        try:
            yield
        finally:
            with self._lock:
                self._open[thread].remove(block)
                if not self._open[thread]:
                    del self._open[thread]
                self._take_off()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """For this thread, whose blocks stay open."""
        thread = threading.get_ident()
        with self._lock:
            blocks = self._open.pop(thread, None)
        try:
            yield
        finally:
            if blocks:
                with self._lock:
                    self._open[thread] = blocks
                    # Another thread's block may have been the last one meanwhile.
                    self._put_on()

    def _put_on(self) -> None:
        if knobs.runtime.jit_cache_hook is not self:
            self._before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, self

    def _take_off(self) -> None:
        # A hook that another put over this one since then is theirs to take off.
        if not self._open and not self._refused and knobs.runtime.jit_cache_hook is self:
            self._before, knobs.runtime.jit_cache_hook = None, self._before


_HOOK = _Hook()


def _question(kernel: Any, compile: dict[str, Any]) -> dict[str, Any]:  # noqa: A002 -- Triton's name
    target = driver.active.get_current_target()
    return {
        "module": kernel.__module__,
        "kernel": kernel.__name__,
        # Of Triton 3.6 it depends on which kernel is asked first: here and there that is the order of launches.
        "source": kernel.cache_key,
        "target": (target.backend, target.arch, target.warp_size),
        "variant": compile["specialization_data"],
    }


def _mark(question: dict[str, Any]) -> Path:
    """What lies beside Triton's own files once the variant is among them: its own names are not known before."""
    text = json.dumps([triton.__version__, question], sort_keys=True)
    return Path(knobs.cache.dir) / _MARKS / hashlib.sha256(text.encode()).hexdigest()[:32]


def has_compiled() -> bool:
    """Whether anything was ever compiled into this cache; then a start of the process can wait until it is needed."""
    return (Path(knobs.cache.dir) / _MARKS).is_dir()


def compile_variants(
    questions: Sequence[dict[str, Any]],
    seconds: float,
    device: int,
    *,
    stopped: threading.Event,
    on_answer: Callable[[int, bool], object],
) -> None:
    """Have these, which were noted for the device of that number, in Triton's cache, in this order, each with its
    launcher: another process is to launch them.

    `on_answer` hears of each by its place, and whether it was compiled, in some thread. It ends with the seconds, or
    once `stopped` is set.
    """
    end = time.monotonic() + seconds
    start()
    launchers = _Launchers()
    # Two cores are for those who measure meanwhile.
    pool = ThreadPoolExecutor(min(max(1, _cores() - 2), MOST_WORKERS), thread_name_prefix="rocm-sd-precompile")

    def compile_one(place: int, question: dict[str, Any]) -> None:
        if time.monotonic() >= end or stopped.is_set():
            return
        compiled = _ask(question).word == COMPILED
        if compiled:
            with suppress(Exception):  # whoever launches it meets the error again
                get_ready().join()
                driver.active.set_current_device(device)
                launchers.build_for(question)
        on_answer(place, compiled)

    try:
        under_way = [pool.submit(compile_one, *each) for each in enumerate(questions)]
        while time.monotonic() < end and not stopped.is_set():
            if not wait(under_way, min(_STOP_S, max(0.0, end - time.monotonic()))).not_done:
                break
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class _Launchers:
    """Up to Triton 3.6 each signature of a kernel has a launcher in C, for which the first launch would wait half a
    second. They lie in Triton's cache, too.
    """

    def __init__(self) -> None:
        self._known: set[Any] = set()
        self._lock = threading.Lock()

    def _is_new(self, signature: Any) -> bool:
        with self._lock:
            known = signature in self._known
            self._known.add(signature)
        return not known

    def build(self, compiled: Any) -> None:
        if self._is_new((compiled.src.fn, *compiled.src.signature.items())):
            # Not kernel.run: that fills in the kernel's handles one by one, while another thread may launch it.
            driver.active.launcher_cls(compiled.src, compiled.metadata)

    def build_for(self, question: dict[str, Any]) -> None:
        """Of a variant that another process will launch: it is not even loaded where its signature is known."""
        signature = json.dumps(json.loads(question["variant"]).get("signature"))
        if self._is_new((question["module"], question["kernel"], signature)):
            kernel = getattr(importlib.import_module(question["module"]), question["kernel"])
            self.build(kernel.preload(question["variant"]))


def skips_launches() -> bool:
    """Whether this thread is inside a block: what it computes is garbage."""
    return _HOOK.is_serving()


def launching() -> AbstractContextManager[None]:
    """Launches of this thread are made within, also inside a block that only notes them."""
    return _HOOK.suspended()


class Taker(Protocol):
    """What is open in a thread: it takes each variant whose launch is skipped."""

    def take(self, kernel: Any, compile: dict[str, Any]) -> None: ...  # noqa: A002 -- Triton's name


@dataclass(frozen=True, eq=False)
class _Notes:
    questions: list[dict[str, Any]]

    def take(self, kernel: Any, compile: dict[str, Any]) -> None:  # noqa: A002 -- Triton's name
        self.questions.append(_question(kernel, compile))


@contextmanager
def noting() -> Iterator[list[dict[str, Any]]]:
    """Skip launches of what this process has not loaded, and note each as a question for `compile_variants`."""
    questions: list[dict[str, Any]] = []
    with _HOOK.serving(_Notes(questions)):
        yield questions


@dataclass(eq=False)
class _Block:
    pool: ThreadPoolExecutor
    done: Precompiled
    forks: bool
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _wanted: set[_Variant] = field(default_factory=set)
    _launchers: _Launchers = field(default_factory=_Launchers)

    def take(self, kernel: Any, compile: dict[str, Any]) -> None:  # noqa: A002 -- Triton's name
        variant = _variant(kernel, compile)
        if variant not in self._wanted:
            self._wanted.add(variant)
            self.pool.submit(self._compile, kernel, variant, _question(kernel, compile))

    def _compile(self, kernel: Any, variant: _Variant, question: dict[str, Any]) -> None:
        try:
            get_ready().join()
            # A new thread is on the first GPU, whichever the model is on.
            driver.active.set_current_device(variant[1])
            answer = _ask(question) if self.forks else Answer(HERE)
            if answer.said:
                log.debug("%s: its compiler wrote:\n%s", kernel.__name__, answer.said)
            refused = _refusal(kernel.__name__, answer)
            if refused is not None:
                _HOOK.refuse(variant, refused)
                raise refused  # noqa: TRY301 -- counted and noted as any other
            in_process = answer.word == COMPILED
            self._launchers.build(kernel.preload(question["variant"]))
        except Exception as error:  # noqa: BLE001 -- whatever a compiler raises, the real launch raises again
            log.debug("%s: a variant could not be compiled ahead: %s", kernel.__name__, error)
            with self._lock:
                self.done.failed += 1
        else:
            with self._lock:
                self.done.compiled += 1
                self.done.in_process += in_process


def _refusal(kernel: str, answer: Answer) -> CompilerFailed | None:
    """What the launch of a variant raises that a fork could not compile; None where this process may."""
    if answer.word == CRASHED:
        return CompilerCrashed(f"its compiler crashed ({kernel}: {answer.why}).")
    if answer.word == FAILED:
        return CompilerFailed(f"its compiler failed ({kernel}: {answer.why}).")
    if answer.word == ENDED:
        return CompilerFailed(f"the process that compiles it was ended twice ({kernel}: {answer.why or 'no answer'}).")
    return None


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
    pool = ThreadPoolExecutor(count, thread_name_prefix="rocm-sd-precompile")
    block = _Block(pool, done, forks)
    try:
        with _HOOK.serving(block):
            yield done
        pool.shutdown(wait=True)
    finally:
        # After an error, what has not begun is not begun any more.
        pool.shutdown(wait=True, cancel_futures=True)
        done.seconds = time.monotonic() - began
