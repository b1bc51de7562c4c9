"""Calls of a split model from graphs: what lies between its exchanges is captured, and these are made in between.

The first call of a kind runs as it is, the second is written down, and then captured by this rank alone
(`engine/capture/segments.py`). A replay is held against the call's own answer, and on changed inputs against eager
runs, which are timed, too: a graph that differs is not used, nor one that is slower. Ranks need not agree on it, since
a call exchanges the same either way.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from rocm_sd import transforms
from rocm_sd.engine import Installed
from rocm_sd.engine.capture import (
    DRAWS_NUMBERS,
    BetweenExchanges,
    Drawn,
    Exchanged,
    FlatCall,
    NotAdopted,
    Snapshot,
    Trial,
    capture_between,
    capturing,
    flatten,
    running,
)
from rocm_sd.errors import first_line
from rocm_sd.measuring import Stopwatch
from rocm_sd.rewrite import forwards

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from torch import nn

__all__ = ["install_graphs"]

# Sizes of pictures that are drawn in turn; each holds the memory of a call.
_MOST_KINDS = 4
# A model that changes itself at every call would be captured anew at every second call.
_MOST_CAPTURES = 8


@dataclass
class _Kind:
    """One kind of call. `graph`: None until its second call, or where `why_not` says why there is none."""

    inputs: list[torch.Tensor]
    tree: Any = None
    snapshot: Snapshot | None = None
    graph: BetweenExchanges | None = None
    why_not: str | None = None

    def take_in(self, tensors: list[torch.Tensor]) -> None:
        for place, tensor in zip(self.inputs, tensors, strict=True):
            place.copy_(tensor, non_blocking=True)

    def answer(self, outputs: list[torch.Tensor]) -> Any:
        """Copies: those of a graph are overwritten by its next replay."""
        return pytree.tree_unflatten([output.clone() for output in outputs], self.tree)


class _SplitCalls:
    def __init__(self, name: str) -> None:
        self._name = name
        self._kinds: dict[Hashable, _Kind] = {}
        self._captures: Counter[Hashable] = Counter()
        self._busy = threading.Lock()
        self.replays = 0
        self.eager: Counter[str] = Counter()

    def __call__(self, model: Any, whole: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = model.device
        if torch.compiler.is_compiling() or transforms.at_hand():
            return whole(*args, **kwargs)
        if torch.is_grad_enabled() or torch.is_autocast_enabled(device.type):
            return whole(*args, **kwargs)
        if not self._busy.acquire(blocking=False):
            return whole(*args, **kwargs)
        try:
            flat = flatten(args, kwargs, device)
            if flat is None:
                self.eager["an input is neither a tensor on its device nor a plain value"] += 1
                return whole(*args, **kwargs)
            return self._answer(model, whole, flat, (args, kwargs))
        finally:
            self._busy.release()

    def _answer(self, model: Any, whole: Callable[..., Any], flat: FlatCall, given: Any) -> Any:
        args, kwargs = given
        kind = self._kinds.get(flat.key)
        if kind is not None and kind.graph is not None and kind.snapshot is not None:
            changed = kind.snapshot.difference()
            if changed is None:
                self.replays += 1
                with running(model.device):
                    kind.take_in(flat.tensors)
                    kind.graph.graph.replay()
                    return kind.answer(kind.graph.graph.outputs)
            self._kinds.pop(flat.key)
            kind = None
        if kind is None:
            self._make_room()
            self._kinds[flat.key] = _Kind([torch.empty_like(tensor, device=model.device) for tensor in flat.tensors])
            return whole(*args, **kwargs)
        if kind.why_not is not None:
            self.eager[kind.why_not] += 1
            return whole(*args, **kwargs)
        return self._written_down(model, whole, kind, flat, given)

    def _make_room(self) -> None:
        while len(self._kinds) >= _MOST_KINDS:
            self._kinds.pop(next(iter(self._kinds)))

    def _written_down(self, model: Any, whole: Callable[..., Any], kind: _Kind, flat: FlatCall, given: Any) -> Any:
        """Of the second call: its own answer, whatever comes of the graph."""
        exchanged, (args, kwargs) = Exchanged(), given
        self._captures[flat.key] += 1
        drawn = Drawn(model.device)
        with exchanged.written_down():
            right = whole(*args, **kwargs)
        draws = bool(drawn)
        kind.why_not = exchanged.why_not
        if self._captures[flat.key] > _MOST_CAPTURES:
            kind.why_not = DRAWS_NUMBERS if draws else "the model keeps changing"
        if draws:
            # Trials would draw more, and this rank's numbers would be ahead of the others'. Another thread may have
            # drawn meanwhile: the next calls will tell.
            self.eager[DRAWS_NUMBERS] += 1
            return right
        try:
            if kind.why_not is None:
                with capturing(model.device):
                    kind.graph = self._tried(model, whole, kind, flat, exchanged, right)
                kind.snapshot = Snapshot(model)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the call has its answer
            kind.graph, kind.inputs = None, []
            kind.why_not = str(error) if isinstance(error, NotAdopted) else first_line(error)
        return right

    def _tried(
        self, model: Any, whole: Callable[..., Any], kind: _Kind, flat: FlatCall, exchanged: Exchanged, right: Any
    ) -> BetweenExchanges:
        """Nothing is sent here. Raises NotAdopted."""
        device = model.device

        def run() -> list[torch.Tensor]:
            args, kwargs = flat.with_tensors(kind.inputs)
            leaves, kind.tree = pytree.tree_flatten(whole(*args, **kwargs))
            if not leaves or not all(type(leaf) is torch.Tensor for leaf in leaves):
                raise NotAdopted("its answer is not made of tensors alone")
            return list(leaves)

        def alone() -> Any:
            with exchanged.in_place_of_sending():
                return kind.answer(run())

        kind.take_in(flat.tensors)
        graph = capture_between(run, device, exchanged)
        graph.replay_alone(exchanged)
        trial = Trial.begun(kind.answer(graph.graph.outputs), right, alone)
        for turn in range(trial.turns):
            kind.take_in(flat.changed(turn + 1).tensors)
            _, graph_ms = _timed(lambda: graph.replay_alone(exchanged), device)
            eager, eager_ms = _timed(alone, device)
            trial.take(kind.answer(graph.graph.outputs), eager, graph_ms, eager_ms)
        slower = trial.why_slower(self._name)
        if slower is not None:
            raise NotAdopted(slower)
        return graph

    def clear(self) -> None:
        self._kinds.clear()

    def notes(self) -> Iterator[str]:
        graphs = [kind.graph.graph for kind in self._kinds.values() if kind.graph is not None]
        if graphs or self.replays:
            parts = max((graph.blocks for graph in graphs), default=0)
            yield f"{self._name}: graphs between its exchanges ({parts} for a call), replayed {self.replays} times"
        for why, calls in self.eager.items():
            yield f"{self._name}: {calls} calls without a graph, because {why}"


def _timed(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """What it gave, and milliseconds. On a CPU a trace stands for the graph, and its time for nothing: none."""
    if device.type != "cuda":
        return call(), 0.0
    given: list[Any] = []
    ms = Stopwatch(device).milliseconds(lambda: given.append(call()))
    return given[-1], ms


def install_graphs(model: nn.Module) -> Installed:
    """Around the strategies that split the model, and inside of those that split its batch."""
    calls = _SplitCalls(type(model).__name__)
    take_off = forwards.surround(model, calls)

    def restore() -> None:
        take_off()
        calls.clear()

    return Installed(lambda: tuple(calls.notes()), restore)
