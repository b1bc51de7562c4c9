"""A function of tensors that stay where they are, recorded once and replayed.

On a GPU the recording is a graph of its launches. Elsewhere it is the trace of its tensor operations: replayed, it
reads the same memory and has the same Python values baked in as a graph would have, so that what makes a graph stale
makes a trace stale, and the tests of a machine without a GPU see it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Recording", "record"]

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Recording:
    """`replay` fills `outputs`, which are the same tensors every time. `memory`: bytes that it holds on its device."""

    outputs: Tensors
    replay: Callable[[], None]
    memory: int = 0


def record(function: Callable[[], Tensors], device: torch.device) -> Recording:
    """The function must have run before: what it compiles, moves or chooses at its first call is no part of it."""
    return _graph(function, device) if device.type == "cuda" else _trace(function)


def _graph(function: Callable[[], Tensors], device: torch.device) -> Recording:
    reserved = torch.cuda.memory_reserved(device)
    graph = torch.cuda.CUDAGraph()
    # Other threads (previews, loaders) may go on using the GPU meanwhile.
    with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = function()
    return Recording(outputs, graph.replay, max(0, torch.cuda.memory_reserved(device) - reserved))


def _trace(function: Callable[[], Tensors]) -> Recording:
    traced: Any = make_fx(function, tracing_mode="real")()
    outputs = [output.clone() for output in traced()]

    def replay() -> None:
        for output, value in zip(outputs, traced(), strict=True):
            output.copy_(value)

    return Recording(outputs, replay)
