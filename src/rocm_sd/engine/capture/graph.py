"""A function of tensors that stay where they are, captured once and replayed.

On a GPU the graph is one of its launches. Elsewhere it is the trace of its tensor operations: replayed, it
reads the same memory and has the same Python values baked in as a graph of launches would have, so that what makes one
stale makes the other stale, and tests without a GPU see it. Graphs are kept in the order of their last use, within a
bound on the memory that they hold together.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from rocm_sd.ops import library_scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

__all__ = ["Graph", "GraphCache", "capture_graph"]

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Graph:
    """`replay` fills `outputs`, which are the same tensors every time. `memory`: bytes that it holds on its device."""

    outputs: Tensors
    replay: Callable[[], None]
    memory: int = 0


def capture_graph(function: Callable[[], Tensors], device: torch.device) -> Graph:
    """The function must have run before: what it compiles, moves or chooses at its first call is no part of it."""
    return _launches(function, device) if device.type == "cuda" else _trace(function)


def _launches(function: Callable[[], Tensors], device: torch.device) -> Graph:
    reserved = torch.cuda.memory_reserved(device)
    graph = torch.cuda.CUDAGraph()
    # Other threads (previews, loaders) may go on using the GPU meanwhile.
    with (
        torch.cuda.device(device),
        library_scratch.given_back(),
        torch.cuda.graph(graph, capture_error_mode="thread_local"),
    ):
        outputs = function()
    return Graph(outputs, graph.replay, max(0, torch.cuda.memory_reserved(device) - reserved))


def _trace(function: Callable[[], Tensors]) -> Graph:
    with _Tape() as tape:
        results = function()
    played = tape.player(results)
    outputs = [output.clone() for output in played()]

    def replay() -> None:
        for output, value in zip(outputs, played(), strict=True):
            output.copy_(value)

    return Graph(outputs, replay)


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each operation: what is a result of another one by number, everything else as the very object it was.

    A tenth of the cost of torch's own tracer, which makes a graph that could be compiled.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: list[tuple[Any, list[Any], Any, list[tuple[int, int]], list[int | None]]] = []
        self._numbers: dict[int, int] = {}
        # Held while tracing, or another tensor would come by the same identity.
        self._alive: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        leaves, tree = pytree.tree_flatten((args, kwargs))
        places = [(at, self._numbers[id(leaf)]) for at, leaf in enumerate(leaves) if id(leaf) in self._numbers]
        known = {at for at, _ in places}
        outs = pytree.tree_leaves(result)
        self._alive += [*leaves, *outs]
        kept = [None if at in known else leaf for at, leaf in enumerate(leaves)]
        self._steps.append((func, kept, tree, places, [self._number(out) for out in outs]))
        return result

    def _number(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        return self._numbers.setdefault(id(value), len(self._numbers))

    def player(self, results: Tensors) -> Callable[[], Tensors]:
        wanted = [(self._numbers.get(id(result)), result) for result in results]
        steps = self._steps
        self._alive.clear()

        def play() -> Tensors:
            values: dict[int | None, Any] = {}
            for func, kept, tree, places, numbers in steps:
                leaves = list(kept)
                for at, number in places:
                    leaves[at] = values[number]
                args, kwargs = pytree.tree_unflatten(leaves, tree)
                values.update(zip(numbers, pytree.tree_leaves(func(*args, **kwargs)), strict=True))
            return [result if number is None else values[number] for number, result in wanted]

        return play


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
