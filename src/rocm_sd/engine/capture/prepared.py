"""What a graph of a UNet takes in place of the prompt and the timestep: filled once per run, and once per step."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from inspect import Signature, signature
from typing import TYPE_CHECKING, Any
from weakref import ref

from rocm_sd.engine.capture.graph import Graph, capture_graph
from rocm_sd.engine.capture.hoisting import Hoist, time_tensors
from rocm_sd.rewrite import conditioning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch import nn

    from rocm_sd.engine.schedule import ScheduleRun

    RunOf = Callable[[torch.Tensor], ScheduleRun | None]

__all__ = ["Prepared"]


@dataclass(frozen=True, eq=False)
class _Identity:
    """Tensors as they were at a time of a run."""

    run: ScheduleRun
    tensors: tuple[ref[torch.Tensor], ...]
    states: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, run: ScheduleRun | None, *tensors: torch.Tensor) -> _Identity | None:
        """None outside of a run, and where a tensor keeps no count of its changes."""
        if run is None or any(tensor.is_inference() for tensor in tensors):
            return None
        states = tuple((tensor._version, tensor.data_ptr()) for tensor in tensors)  # noqa: SLF001
        return cls(run, tuple(map(ref, tensors)), states)

    def same_as(self, other: _Identity | None) -> bool:
        if other is None or self.run is not other.run or self.states != other.states:
            return False
        # A tensor has one weak reference, and a dead tensor's is no other tensor's.
        return all(mine is theirs for mine, theirs in zip(self.tensors, other.tensors, strict=True))


class Prepared:
    """Of one kind of call. Within a run weights do not change: what was made for the same tensors is kept."""

    def __init__(self, hoist: Hoist, row: torch.Tensor, text: torch.Tensor, batch: int, run_of: RunOf) -> None:
        self.hoist = hoist
        self._run_of = run_of
        self._row = row
        self._text = text
        self._batch = batch
        self._of_the_run = hoist.of_the_run(text)
        self._graph: Graph | None = None
        self._prompt: _Identity | None = None
        self._table: torch.Tensor | None = None
        self._table_of: _Identity | None = None

    @classmethod
    def of(cls, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run_of: RunOf) -> Prepared | None:
        """None where a call with these arguments has to compute everything itself. `run_of`: of a timestep."""
        named = _by_name(model, args, kwargs)
        hoist = Hoist.find(model, named) if named else None
        # One timestep for each picture is a row of its own for each.
        if hoist is None or named["timestep"].numel() != 1:
            return None
        row = hoist.time_rows(named["timestep"].reshape(1), named)[0].clone()
        return cls(hoist, row, named["encoder_hidden_states"].detach().clone(), named["sample"].shape[0], run_of)

    @property
    def memory(self) -> int:
        tables = [] if self._table is None else [self._table]
        return sum(tensor.nbytes for tensor in (self._row, self._text, *self._of_the_run, *tables))

    def capture(self, device: torch.device) -> None:
        graph = capture_graph(partial(self.hoist.of_the_run, self._text), device)
        graph.replay()
        self._graph, self._of_the_run = graph, graph.outputs

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within, the model takes what is prepared. What else its layers ask for is prepared from then on."""
        hoist = self.hoist
        ready = hoist.conditioning(self._row, self._batch, self._of_the_run)
        with conditioning.given(ready), hoist.substituted(hoist.embedding(self._row, self._batch)):
            yield
        if self._graph is None and ready.asked_for:
            hoist.upsamplers += ready.asked_for
            self._of_the_run = hoist.of_the_run(self._text)

    def fill(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = _by_name(self.hoist.unet, args, kwargs)
        timestep = named["timestep"]
        run = self._run_of(timestep)
        self._fill_for_prompt(run, named["encoder_hidden_states"])
        number = None if run is None else run.number_of(timestep)
        made_of = _Identity.of(run, *time_tensors(named))
        if run is None or number is None or made_of is None:
            self._row.copy_(self.hoist.time_rows(timestep.reshape(1), named)[0])
            return
        if self._table is None or not made_of.same_as(self._table_of):
            self._table, self._table_of = self.hoist.time_rows(run.timesteps, named), made_of
        self._row.copy_(self._table[number])

    def _fill_for_prompt(self, run: ScheduleRun | None, text: torch.Tensor) -> None:
        prompt = _Identity.of(run, text)
        if prompt is not None and prompt.same_as(self._prompt):
            return
        self._text.copy_(text)
        if self._graph is None:
            self._of_the_run = self.hoist.of_the_run(self._text)
        else:
            self._graph.replay()
        self._prompt = prompt


@lru_cache(maxsize=64)
def _signature(kind: Any) -> Signature:
    return signature(kind.forward)


def _by_name(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call; empty where they do not fit the forward, which will say so itself."""
    kind: Any = type(model)
    try:
        arguments = _signature(kind).bind(model, *args, **kwargs)
    except TypeError:
        return {}
    arguments.apply_defaults()
    return arguments.arguments
