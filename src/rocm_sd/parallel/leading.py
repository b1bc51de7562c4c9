"""Rank 0 decides what is computed: each call that it makes of a model, the others make with it.

    leader = Leader(modules, ...)       # rank 0 calls the modules when it likes, from any thread
    follow(modules, ...)                # the others, until the leader closes

| what rank 0 does | how the others hear of it |
|---|---|
| a call of a module | which one, and the shapes of its inputs, through a socket; then the tensors, by a broadcast |
| `tell(value)` | the value, through the socket |
| nothing, for hours | they wait at the socket: no core is busy, and no collective is under way that could time out |

Calls of all threads come one after the other, in the same order on every rank. One that fails on all ranks alike, after
as many exchanges on each, has failed for whoever made it, and the next one follows. Otherwise ranks would wait for each
other: the job ends, with the error of the rank that has met one.
"""

from __future__ import annotations

import pickle
import socket
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.utils import _pytree as pytree

from rocm_sd.errors import JobFailed, first_line
from rocm_sd.parallel.ranks import Ranks, Traffic
from rocm_sd.rewrite import forwards

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import nn

__all__ = ["Leader", "connect", "follow", "listen"]

# What failed on one rank fails on another at about the same time, if it fails there at all.
_ALIKE_S = 10.0


def listen(path: Path) -> socket.socket:
    """A socket in a folder of this user's own: whoever can reach it is this user."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(path))
    listening.listen()
    return listening


def connect(path: Path) -> Connection[Any, Any]:
    wire = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    wire.connect(str(path))
    return Connection(wire.detach())


@dataclass(frozen=True)
class _Tensor:
    """One that is broadcast."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Call:
    """Of the n-th module. `given`: its arguments, with a `_Tensor` for each that is broadcast; `dtype`: of its weights,
    which some pipelines change around a call.
    """

    module: int
    dtype: torch.dtype | None
    given: Any


@dataclass(frozen=True)
class _Said:
    value: Any


@dataclass(frozen=True)
class _Failed:
    """After how many exchanges of the call."""

    exchanges: int


@dataclass(frozen=True)
class _GoOn:
    """All have failed alike."""


class Leader:
    """On rank 0. `wires`: to each of the others; `traffics`: what counts the exchanges of the modules' strategies.
    `on_failure`: called once, where a call has failed here and not everywhere; the job is to end then.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        traffics: Sequence[Traffic],
        wires: Sequence[Connection[Any, Any]],
        device: torch.device,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self.failed: BaseException | None = None
        self.traffic = Traffic()
        self._ranks = Ranks("inputs", dist.group.WORLD, self.traffic)
        self._traffics, self._wires, self._device = [*traffics, self.traffic], list(wires), device
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._last: Any = None
        self._take_off = [self._lead(number, module) for number, module in enumerate(modules)]

    def tell(self, value: Any) -> None:
        """A value for `on_told` of the others, between two calls."""
        with self._lock:
            self._send(pickle.dumps(_Said(value)))

    def close(self) -> None:
        """The others return from `follow`."""
        with self._lock:
            for take_off in self._take_off:
                take_off()
            if self.failed is None:
                self._send(pickle.dumps(None))

    def _lead(self, number: int, module: nn.Module) -> Callable[[], None]:
        def answer(module: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with self._lock:
                if self.failed is not None:
                    raise self.failed
                before = _exchanges(self._traffics)
                words, tensors = self._described(number, module, args, kwargs)
                try:
                    self._follow_the_last()
                    self._send(words)
                    for tensor in tensors:
                        self._ranks.spread(tensor)
                    return inner(*args, **kwargs)
                except Exception as error:
                    if not self._failed_alike(error, _exchanges(self._traffics) - before):
                        self.failed = error
                        self._on_failure()
                    raise
                finally:
                    self._is_last()

        return forwards.surround(module, answer, name=_method(module))

    def _described(
        self, number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bytes, list[torch.Tensor]]:
        """A call in words, and the tensors that are broadcast after it."""
        tensors: list[torch.Tensor] = []

        def described(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            # What lies on the host beside a GPU is a number or two, and goes with the words.
            if leaf.device.type != self._device.type:
                return leaf.detach()
            tensors.append(leaf.detach())
            return _Tensor(tuple(leaf.shape), leaf.dtype)

        return pickle.dumps(_Call(number, _dtype(module), pytree.tree_map(described, (args, kwargs)))), tensors

    def _send(self, words: bytes) -> None:
        try:
            for wire in self._wires:
                wire.send_bytes(words)
        except OSError as error:
            raise JobFailed(
                f"Another process of this job cannot be reached any more ({first_line(error)}).",
                hint="Its own error is the one to look at; start the job again.",
            ) from error

    def _failed_alike(self, error: Exception, exchanges: int) -> bool:
        """Whether the others have failed, too, at the same place: then all are ready for another call."""
        if isinstance(error, JobFailed):
            return False
        try:
            alike = all(wire.poll(_ALIKE_S) and wire.recv() == _Failed(exchanges) for wire in self._wires)
            if alike:
                self._send(pickle.dumps(_GoOn()))
        except (OSError, EOFError, JobFailed):
            return False
        return alike

    def _follow_the_last(self) -> None:
        """Threads have streams of their own here, and the others have one: what is exchanged keeps its order."""
        if self._last is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last)

    def _is_last(self) -> None:
        if self._device.type == "cuda":
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._last = event


def follow(
    modules: Sequence[nn.Module],
    traffics: Sequence[Traffic],
    wire: Connection[Any, Any],
    device: torch.device,
    on_told: Callable[[Any], None] = lambda _value: None,
) -> None:
    """Make each call that rank 0 makes of these modules, the same ones in the same order, until it closes."""
    own = Traffic()
    ranks, counted = Ranks("inputs", dist.group.WORLD, own), [*traffics, own]
    while True:
        try:
            said = wire.recv()
        except (EOFError, OSError) as error:
            raise JobFailed(
                "Rank 0 is gone.", hint="Its own error is the one to look at; start the job again."
            ) from error
        if said is None:
            return
        if isinstance(said, _Said):
            on_told(said.value)
            continue
        before = _exchanges(counted)
        try:
            _call(modules[said.module], said, ranks, device)
        except JobFailed:
            raise
        except Exception:
            # Rank 0 may have met it as well, and says so; or it waits for this rank in vain.
            wire.send(_Failed(_exchanges(counted) - before))
            if not wire.poll(_ALIKE_S) or not isinstance(wire.recv(), _GoOn):
                raise


@torch.no_grad()
def _call(module: nn.Module, said: _Call, ranks: Ranks, device: torch.device) -> None:
    def received(leaf: Any) -> Any:
        if not isinstance(leaf, _Tensor):
            return leaf
        return ranks.spread(torch.empty(leaf.shape, dtype=leaf.dtype, device=device))

    args, kwargs = pytree.tree_map(received, said.given, is_leaf=lambda leaf: isinstance(leaf, _Tensor))
    if said.dtype is not None and said.dtype != _dtype(module):
        module.to(said.dtype)
    getattr(module, _method(module))(*args, **kwargs)


def _method(module: nn.Module) -> str:
    """What is split of it: of a VAE its `decode`, as its own forward would encode, too."""
    return "decode" if hasattr(module, "decode") and hasattr(module, "decoder") else "forward"


def _dtype(module: nn.Module) -> torch.dtype | None:
    first = next(module.parameters(), None)
    return None if first is None else first.dtype


def _exchanges(traffics: Sequence[Traffic]) -> int:
    return sum(traffic.exchanges for traffic in traffics)
