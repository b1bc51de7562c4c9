"""A function captured as several small graphs, replayed one after the other.

ROCm is reported to read stale pointers in graphs of more than 200 nodes (ROCm/hip#3887). Between two operations of the
function one capture is ended and the next begun, in the same memory pool: what crosses stays where it lies, and what is
free in one block is used again by the next. The function runs once, as for one graph.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rocm_sd.arch.torch_libraries import counter_of_nodes
from rocm_sd.engine.capture.graph import Graph, Pieces
from rocm_sd.engine.capture.tape import Tape, launches

if TYPE_CHECKING:
    from collections.abc import Callable

    Tensors = list[torch.Tensor]

__all__ = ["MOST_NODES", "capture_blocks"]

# The fault is reported from about 200 on.
MOST_NODES = 149
# Where nodes cannot be counted. A convolution with a copy of its input on the way, or a product that is cut along its
# inner dimension, is two or three launches; most operations are one.
_LAUNCHES_OF_AN_OPERATION = 3
_TRIES = 4


def capture_blocks(function: Callable[[], Tensors], device: torch.device) -> Graph:
    """As `capture_graph`, in graphs of at most MOST_NODES each; one that would be a single block is refused."""
    graph = _launches(function, device) if device.type == "cuda" else _trace(function)
    if graph.blocks == 1:
        raise TooSmall(f"it has less than {MOST_NODES + 1} nodes, too few to be cut into blocks")
    return graph


class TooSmall(RuntimeError):
    """A graph that is one block already."""


def _trace(function: Callable[[], Tensors]) -> Graph:
    with Tape() as tape:
        results = function()
    outputs, replay, blocks = tape.replayed_in_blocks(results, MOST_NODES)
    return Graph(outputs, replay, blocks=blocks)


def _launches(function: Callable[[], Tensors], device: torch.device) -> Graph:
    operations = MOST_NODES if _node_counter() is not None else MOST_NODES // _LAUNCHES_OF_AN_OPERATION
    for _ in range(_TRIES):
        cutter = _Cutter(operations)
        outputs, memory = cutter.capture(function, device)
        largest = max(cutter.nodes, default=0)
        if largest <= MOST_NODES:
            return Graph(outputs, _in_order(cutter.graphs), memory, len(cutter.graphs))
        # A little less than in proportion: the next blocks begin elsewhere.
        operations = max(1, operations * MOST_NODES * 9 // (largest * 10))
        del cutter, outputs
    raise RuntimeError(f"a block of at most {operations} operations has {largest} nodes, and {MOST_NODES} are allowed")


def _in_order(graphs: list[Any]) -> Callable[[], None]:
    replays = [graph.replay for graph in graphs]

    def replay() -> None:
        for one in replays:
            one()

    return replay


class _Cutter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Ends one capture and begins the next before each operation that finds the block full."""

    def __init__(self, operations: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations = operations
        self._count = 0
        self._pieces = Pieces(_new_graph, self._ended)
        # Of each graph, where it can be counted.
        self.nodes: list[int] = []

    @property
    def graphs(self) -> list[Any]:
        return self._pieces.graphs

    def capture(self, function: Callable[[], Tensors], device: torch.device) -> tuple[Tensors, int]:
        def cut() -> Tensors:
            with self:
                return function()

        return self._pieces.capture(cut, device)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if launches(func):
            if self._count >= self._operations:
                self._pieces.end()
                self._pieces.begin()
                self._count = 0
            self._count += 1
        return func(*args, **(kwargs or {}))

    def _ended(self, graph: Any) -> None:
        count_nodes = _node_counter()
        if count_nodes is not None:
            self.nodes.append(count_nodes(graph))
            graph.instantiate()


def _new_graph() -> Any:
    new: Any = torch.cuda.CUDAGraph
    return new() if _node_counter() is None else new(keep_graph=True)


@cache
def _node_counter() -> Callable[[Any], int] | None:
    """Of a captured graph that was not instantiated; None where this torch shows none, or the runtime has no count."""
    name = counter_of_nodes()
    if name is None or not all(hasattr(torch.cuda.CUDAGraph, method) for method in ("raw_cuda_graph", "instantiate")):
        return None
    try:
        # A name is looked up in what the library was linked with as well, which is the very runtime that torch uses.
        get_nodes = getattr(ctypes.CDLL(torch._C.__file__), name)  # noqa: SLF001 -- torch has no other name for it
    except (OSError, AttributeError):
        return None
    get_nodes.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t))

    def count(graph: Any) -> int:
        found = ctypes.c_size_t()
        code = get_nodes(graph.raw_cuda_graph(), None, ctypes.byref(found))
        if code:
            raise RuntimeError(f"{name} answers {code}")
        return found.value

    return count
