"""Pictures that are drawn by several threads share each call of their model: they join and leave between steps.

A thread draws one picture by the pipeline's own loop. Where that calls the model, the call waits for those of the other
pictures that are between two steps, all that agree in their shapes are run as one, and each gets its part. Timesteps,
prompts, guidance, seeds and schedulers may be different ones. What a picture is does not depend on who else is drawn.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from rocm_sd.engine.batching.gathering import Gathering, Waiting
from rocm_sd.engine.batching.merging import StepCall, merged
from rocm_sd.engine.memory import is_out_of_memory
from rocm_sd.rewrite import forwards

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence
    from contextvars import Context

    from torch import nn

__all__ = ["LADDER", "BatchDone", "Member", "StepBatcher"]

# Samples of a call, where each number is a graph of its own: what lies between is filled up.
LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# A picture between two steps is waited for as long as it took before, and half as long again; but no longer than this
# share of a call, or this time where calls are short.
_TIMES, _MORE_S, _SHARE, _MOST_S = 1.5, 0.002, 0.5, 0.02
# What is taken for it before it is known, and how much a new one counts.
_FIRST_GUESS_S, _NEW = 0.005, 0.3
# A model that is ready for one group goes on with it for so long while others wait: to make it ready for another one,
# with other LoRAs, may mean to capture its graphs anew.
_STAYS_S = 2.0
# Calls that the GPU may have before it: one that runs and one that follows. With more, whoever joins or cancels waits.
_IN_FLIGHT = 2

_CURRENT: ContextVar[Member | None] = ContextVar("rocm_sd_batching_member", default=None)


@dataclass(eq=False)
class Member:
    """One picture. `group`: only those with the same one share a call (a set of LoRAs, say); None shares none.
    `stop()`: an error to raise at the next step, or None.
    """

    group: Hashable | None
    stop: Callable[[], BaseException | None]
    # What it called last, while it is between two steps; since when, and how long it takes from one to the next.
    between: Hashable | None = None
    answered: float = 0.0
    takes_s: float = _FIRST_GUESS_S

    def called(self) -> None:
        if self.between is not None:
            self.takes_s += _NEW * (time.monotonic() - self.answered - self.takes_s)
        self.between = None


@dataclass(frozen=True)
class BatchDone:
    """`pictures`: how many shared the call; `samples`: how many it had, `padded` of them for nothing; `seconds`: how
    long it took, on a GPU until the call before it was over.
    """

    model: str
    pictures: int
    samples: int
    padded: int
    seconds: float


@dataclass(frozen=True, eq=False)
class _Asked:
    model: nn.Module
    inner: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    call: StepCall
    key: Hashable | None
    member: Member
    context: Context = field(default_factory=copy_context)


class StepBatcher:
    """Of one device. `most`: samples of a call; a picture with guidance has two. `ladder`: numbers of samples that a
    call may have, or none for any.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        most: int = 16,
        ladder: Sequence[int] = (),
        on_batch: Callable[[BatchDone], None] | None = None,
    ) -> None:
        self._device = device
        self._ladder = tuple(size for size in ladder if size <= most)
        self._on_batch = on_batch
        self._members: set[Member] = set()
        self._lock = threading.Lock()
        self._seconds: dict[Hashable, float] = {}
        self._in_flight: deque[Any] = deque()
        # By model: how it is made ready for a group, and for which it is.
        self._prepare: WeakKeyDictionary[nn.Module, Callable[[Hashable | None], None]] = WeakKeyDictionary()
        self._ready_for: WeakKeyDictionary[nn.Module, Hashable | None] = WeakKeyDictionary()
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._calls: Gathering[_Asked, Any] = Gathering(
            "rocm-sd steps", self._run, most=most, patience=self._patience, first=self._next
        )

    def take(
        self, model: nn.Module, prepare: Callable[[Hashable | None], None] | None = None, name: str | None = None
    ) -> Callable[[], None]:
        """Have the calls of members go through here; how to undo it. Calls of others go on as before.

        `prepare(group)`: called before the model's first call, and where a call is of another group than the last one.
        `name`: what it is called in `BatchDone`, its class if none is given.
        """
        self._names[model] = name or type(model).__name__
        if prepare is not None:
            self._prepare[model] = prepare

        def answer(model: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            member = _CURRENT.get()
            if member is None or member not in self._members:
                return inner(*args, **kwargs)
            return self._ask(member, model, inner, args, kwargs)

        return forwards.surround(model, answer)

    @contextmanager
    def member(
        self, group: Hashable | None = (), stop: Callable[[], BaseException | None] = lambda: None
    ) -> Iterator[Member]:
        """Within, and on this thread, calls of the models are shared."""
        member = Member(group, stop)
        with self._lock:
            self._members.add(member)
        token = _CURRENT.set(member)
        try:
            yield member
        finally:
            _CURRENT.reset(token)
            with self._lock:
                self._members.discard(member)
            self._calls.look_again()

    def rest(self, member: Member) -> None:
        """No call of it is to be waited for: it was its last one, or what follows takes long."""
        member.between = None
        self._calls.look_again()

    @property
    def waiting(self) -> int:
        return self._calls.waiting

    def close(self) -> None:
        self._calls.close()

    def _ask(
        self, member: Member, model: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        error = member.stop()
        if error is not None:
            raise error
        call = StepCall.of(model, args, kwargs)
        key = None if call.key is None or member.group is None else (id(model), member.group, call.key)
        member.called()
        return self._calls.ask(_Asked(model, inner, args, kwargs, call, key, member), key, call.samples)

    def _patience(self, batch: Sequence[Waiting[_Asked, Any]]) -> float:
        """Until all pictures are there that made the same kind of call last, but not for long."""
        first, asked = batch[0], batch[0].item
        with self._lock:
            between = [member for member in self._members if member.between is not None]
        if not self._is_ready(asked) and any(one.group == self._ready_for.get(asked.model, self) for one in between):
            return _STAYS_S
        most = max(_SHARE * self._seconds.get(first.key, 0.0), _MOST_S)
        expected = [one for one in between if one.between == first.key]
        until = [one.answered + min(_TIMES * one.takes_s + _MORE_S, most) for one in expected]
        return max(until) - first.since if until else 0.0

    def _is_ready(self, asked: _Asked) -> bool:
        return asked.model not in self._prepare or self._ready_for.get(asked.model, self) == asked.member.group

    def _next(self, waiting: Sequence[Waiting[_Asked, Any]]) -> Waiting[_Asked, Any]:
        """Who has waited longest; of a model that would have to be made ready for it, those that it is ready for."""
        first = waiting[0]
        if self._is_ready(first.item) or time.monotonic() - first.since > _STAYS_S:
            return first
        return next((one for one in waiting if one.item.model is first.item.model and self._is_ready(one.item)), first)

    def _run(self, batch: list[_Asked]) -> list[Any]:
        began = time.perf_counter()
        first, padded = batch[0], 0
        group = first.member.group
        if not self._is_ready(first):
            # Where that fails half-way, the model is ready for nobody.
            self._ready_for.pop(first.model, None)
            self._prepare[first.model](group)
            self._ready_for[first.model] = group
        try:
            # The loops of pipelines run so, each on its own thread.
            with torch.no_grad():
                if len(batch) == 1 and (first.key is None or not self._ladder):
                    answers = [first.context.run(first.inner, *first.args, **first.kwargs)]
                else:
                    joined = merged([one.call for one in batch], self._rung(sum(one.call.samples for one in batch)))
                    padded = joined.padded
                    answers = joined.apart(first.inner(**joined.named))
        except Exception as error:
            if len(batch) > 1 and is_out_of_memory(error):
                self._calls.most = max(1, sum(one.call.samples for one in batch) // 2)
            raise
        self._wait_for_earlier()
        # Before any of them hears of it: whoever is next is waited for from now on.
        for one in batch:
            one.member.between, one.member.answered = one.key, time.monotonic()
        seconds = time.perf_counter() - began
        if first.key is not None:
            self._seconds[first.key] = seconds
        if self._on_batch is not None:
            samples = sum(one.call.samples for one in batch) + padded
            self._on_batch(BatchDone(self._names[first.model], len(batch), samples, padded, seconds))
        return answers

    def _rung(self, samples: int) -> int | None:
        return next((size for size in self._ladder if size >= samples), None)

    def _wait_for_earlier(self) -> None:
        if self._device.type != "cuda":
            return
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._in_flight.append(event)
        while len(self._in_flight) >= _IN_FLIGHT:
            self._in_flight.popleft().synchronize()
