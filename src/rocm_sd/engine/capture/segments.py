"""A function that exchanges tensors with other processes, as graphs of what lies between its exchanges.

An exchange is no part of a graph: gloo's cannot be captured, and a rank that captures NCCL's or RCCL's while another
does not would wait for ever. So a capture sends nothing. The function runs once with its exchanges written down; then
it is captured, tried and timed with what came in that run, by this process alone. Whether it is replayed or runs
eagerly, a call makes the same exchanges in the same order: each rank may decide for itself.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes

from rocm_sd.engine.capture.graph import Graph, Pieces
from rocm_sd.engine.capture.tape import Tape
from rocm_sd.engine.capture.trial import NotAdopted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["BetweenExchanges", "Exchanged", "capture_between", "exchange", "no_exchange"]

Tensors = list[torch.Tensor]

_CURRENT = threading.local()


def exchange(function: Callable[..., Tensors], inputs: Tensors) -> Tensors:
    """`function(*inputs)`, which sends and receives; in a graph, something between two of them."""
    at_work: _Recorder | None = getattr(_CURRENT, "recorder", None)
    return function(*inputs) if at_work is None else at_work.exchange(function, inputs)


def no_exchange(what: str) -> None:
    """Something is sent that no capture knows of: what runs now is not captured."""
    at_work: _Recorder | None = getattr(_CURRENT, "recorder", None)
    if at_work is not None:
        at_work.meets(what)


class _Recorder(ABC):
    """Sees the exchanges of one run."""

    @abstractmethod
    def exchange(self, function: Callable[..., Tensors], inputs: Tensors, /) -> Tensors: ...

    def meets(self, what: str) -> None:
        # Nobody else is running this: whoever sent would wait.
        raise NotAdopted(f"{what} between its exchanges")

    @contextmanager
    def at_work(self) -> Iterator[None]:
        before = getattr(_CURRENT, "recorder", None)
        _CURRENT.recorder = self
        try:
            yield
        finally:
            _CURRENT.recorder = before


class Exchanged:
    """What came from other processes in one run of a function, in its order. `why_not`: why it cannot be captured."""

    def __init__(self) -> None:
        self.answers: list[Tensors] = []
        self.why_not: str | None = None

    @contextmanager
    def written_down(self) -> Iterator[None]:
        """Around a run that sends and receives."""
        with _Listening(self).at_work():
            yield

    @contextmanager
    def in_place_of_sending(self) -> Iterator[None]:
        """Around a run by this process alone."""
        with _Answering(self.answers).at_work():
            yield


class _Listening(_Recorder):
    def __init__(self, told: Exchanged) -> None:
        self._told = told

    def exchange(self, function: Callable[..., Tensors], inputs: Tensors, /) -> Tensors:
        answer = function(*inputs)
        # The model may go on in the same memory.
        self._told.answers.append([tensor.clone() for tensor in answer])
        return answer

    def meets(self, what: str) -> None:
        self._told.why_not = self._told.why_not or f"{what} between its exchanges"


class _Answering(_Recorder):
    def __init__(self, answers: list[Tensors]) -> None:
        self._answers = iter(answers)

    def exchange(self, _: Callable[..., Tensors], __: Tensors, /) -> Tensors:
        return _copied(self._answers)


def _copied(answers: Iterator[Tensors]) -> Tensors:
    """The next of them: the model may go on in their memory."""
    answer = next(answers, None)
    if answer is None:
        raise NotAdopted("it exchanges more than in the run before")
    return [tensor.clone() for tensor in answer]


class _Replaying:
    """Gives a replay its exchanges: real ones, or `answers` in their place."""

    def __init__(self) -> None:
        self.answers: Iterator[Tensors] | None = None

    def __call__(self, function: Callable[..., Tensors], *inputs: torch.Tensor) -> Tensors:
        return function(*inputs) if self.answers is None else next(self.answers)


class BetweenExchanges:
    """`graph.replay` exchanges; `replay_alone` has what came before in place of it."""

    def __init__(self, graph: Graph, replaying: _Replaying) -> None:
        self.graph, self._replaying = graph, replaying

    def replay_alone(self, exchanged: Exchanged) -> None:
        self._replaying.answers = iter(exchanged.answers)
        try:
            self.graph.replay()
        finally:
            self._replaying.answers = None


def capture_between(function: Callable[[], Tensors], device: torch.device, exchanged: Exchanged) -> BetweenExchanges:
    """The function must have run before, and `exchanged` is what came then. Nothing is sent."""
    replaying = _Replaying()
    if device.type == "cuda":
        return BetweenExchanges(_Segments(replaying, exchanged.answers).capture(function, device), replaying)
    tape = _OpenTape(replaying, exchanged.answers)
    with tape.recorder.at_work(), tape:
        results = function()
    # Its outputs are made by a first run of it.
    replaying.answers = iter(exchanged.answers)
    outputs, replay = tape.replayed(results)
    replaying.answers = None
    return BetweenExchanges(Graph(outputs, replay, blocks=len(exchanged.answers) + 1), replaying)


class _OpenTape(Tape):
    """A trace with exchanges among its operations."""

    def __init__(self, replaying: _Replaying, answers: list[Tensors]) -> None:
        super().__init__()
        tape, given = self, iter(answers)

        class Recorder(_Recorder):
            def exchange(self, function: Callable[..., Tensors], inputs: Tensors, /) -> Tensors:
                with _disable_current_modes():  # type: ignore[no-untyped-call]
                    answer = _copied(given)
                tape.note(replaying, (function, *inputs), {}, answer)
                return answer

        self.recorder = Recorder()


class _Segments(_Recorder):
    """Ends one capture before an exchange and begins the next after it, in the same memory pool: what crosses stays
    where it lies.
    """

    def __init__(self, replaying: _Replaying, answers: list[Tensors]) -> None:
        self._replaying, self._answers = replaying, iter(answers)
        self._steps: list[Callable[[], None]] = []
        self._pieces = Pieces(ended=lambda graph: self._steps.append(graph.replay))

    def capture(self, function: Callable[[], Tensors], device: torch.device) -> Graph:
        with self.at_work():
            outputs, memory = self._pieces.capture(function, device)
        steps = self._steps

        def replay() -> None:
            for step in steps:
                step()

        return Graph(outputs, replay, memory, len(self._pieces.graphs))

    def exchange(self, function: Callable[..., Tensors], inputs: Tensors, /) -> Tensors:
        self._pieces.end()
        # Outside of a capture: memory of their own, for as long as the graphs are kept.
        landed = _copied(self._answers)
        replaying = self._replaying

        def step() -> None:
            for place, tensor in zip(landed, replaying(function, *inputs), strict=True):
                place.copy_(tensor)

        self._steps.append(step)
        self._pieces.begin()
        return landed
