"""A function of tensors that stay where they are, captured once and replayed.

On a GPU the graph is one of its launches. Elsewhere it is the trace of its tensor operations (tape.py). blocks.py
captures the same function as several graphs. Graphs are kept in the order of their last use, within a bound on the
memory that they hold together.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch

from rocm_sd.engine.capture.tape import Tape
from rocm_sd.ops import library_scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

__all__ = ["Graph", "GraphCache", "Pieces", "capture_graph"]

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Graph:
    """`replay` fills `outputs`, which are the same tensors every time. `memory`: bytes that it holds on its device.

    `blocks`: how many graphs it is, which are replayed one after the other.
    """

    outputs: Tensors
    replay: Callable[[], None]
    memory: int = 0
    blocks: int = 1


def capture_graph(function: Callable[[], Tensors], device: torch.device) -> Graph:
    """The function must have run before: what it compiles, moves or chooses at its first call is no part of it."""
    if device.type == "cuda":
        return _launches(function, device)
    with Tape() as tape:
        results = function()
    return Graph(*tape.replayed(results))


def _launches(function: Callable[[], Tensors], device: torch.device) -> Graph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), library_scratch.given_back():
        # As torch.cuda.graph does next: counted before, what it gives back would hide what the graph takes (SD 1.5's
        # decoder was said to hold 0 MiB; in blocks, where it was counted so, it held 366).
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved(device)
        # Other threads (previews, loaders) may go on using the GPU meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs = function()
    return Graph(outputs, graph.replay, max(0, torch.cuda.memory_reserved(device) - reserved))


class Pieces:
    """Graphs of one function, captured one after the other in one memory pool: what crosses from one to the next stays
    where it lies, and what is free in one is used again by the next. `ended` is called with each of them.
    """

    def __init__(
        self, new_graph: Callable[[], Any] = torch.cuda.CUDAGraph, ended: Callable[[Any], object] = lambda _graph: None
    ) -> None:
        self.graphs: list[Any] = []
        self._new_graph, self._ended = new_graph, ended

    def capture(self, function: Callable[[], Tensors], device: torch.device) -> tuple[Tensors, int]:
        """The outputs, and how many bytes more are reserved than before. The function ends one graph and begins the
        next where it likes.
        """
        with torch.cuda.device(device), library_scratch.given_back():
            # What torch.cuda.graph does before it captures; here once, and not for each graph.
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            reserved = torch.cuda.memory_reserved(device)
            stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                self.begin()
                try:
                    outputs = function()
                except BaseException:
                    with suppress(RuntimeError):
                        self.graphs[-1].capture_end()
                    raise
                self.end()
        return outputs, max(0, torch.cuda.memory_reserved(device) - reserved)

    def begin(self) -> None:
        pool = (self.graphs[0].pool(),) if self.graphs else ()
        self.graphs.append(self._new_graph())
        # As for a whole graph: other threads may go on using the GPU meanwhile.
        self.graphs[-1].capture_begin(*pool, capture_error_mode="thread_local")

    def end(self) -> None:
        self.graphs[-1].capture_end()
        self._ended(self.graphs[-1])


class Held(Protocol):
    @property
    def memory(self) -> int: ...


Item = TypeVar("Item", bound=Held)

# Each graph also has nodes and buffers that no allocator counts.
_MOST = 32


class GraphCache(Generic[Item]):
    """`bound` is asked each time something is put here: free memory comes and goes."""

    def __init__(self, bound: Callable[[], int]) -> None:
        self._bound = bound
        self._items: OrderedDict[Hashable, Item] = OrderedDict()
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items.values())

    @property
    def memory(self) -> int:
        return sum(item.memory for item in self)

    def get(self, key: Hashable) -> Item | None:
        item = self._items.get(key)
        if item is not None:
            self._items.move_to_end(key)
        return item

    def put(self, key: Hashable, item: Item) -> None:
        """The least recently used give way; the one that was just put here stays."""
        self._items[key] = item
        self._items.move_to_end(key)
        # What the items hold is not free, but would be without them: half of it is theirs, as of what is free.
        bound = self._bound() + self.memory // 2
        while len(self) > 1 and (len(self) > _MOST or self.memory > bound):
            self._items.popitem(last=False)
            self.dropped += 1

    def drop(self, key: Hashable) -> None:
        self._items.pop(key, None)

    def clear(self) -> None:
        self._items.clear()
