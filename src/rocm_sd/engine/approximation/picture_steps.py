"""Which step of its picture a call of a model is: those of a run that follow each other without a gap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch

from rocm_sd.engine.approximation.branches import by_name
from rocm_sd.engine.approximation.steps import number_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from rocm_sd.engine.schedule import ScheduleRun

__all__ = ["PictureStep", "PictureSteps"]


class PictureStep(NamedTuple):
    """`since`: how many steps of this picture came before; `of`: how many the schedule has."""

    since: int
    of: int
    is_last: bool


@dataclass(frozen=True)
class _Call:
    run: ref[ScheduleRun]
    number: int
    first: int
    form: tuple[Any, ...]


class PictureSteps:
    """`run_of` says which schedule is being run, and `scheduler_of` whose."""

    def __init__(self, run_of: Callable[[], ScheduleRun | None], scheduler_of: Callable[[], Any]) -> None:
        self._run_of, self._scheduler_of = run_of, scheduler_of
        self._last: _Call | None = None

    def of(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PictureStep | None:
        """None where the call is no step of a known run. A step that does not follow the last one, or is of other
        shapes, is the first of another picture.
        """
        named, run = by_name(model, args, kwargs), self._run_of()
        number = None if run is None else number_of(run, self._scheduler_of(), named.get("timestep"))
        if run is None or number is None:
            self._last = None
            return None
        tensors = [value for value in named.values() if isinstance(value, torch.Tensor)]
        form = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
        last = self._last
        follows = last is not None and last.run() is run and last.number == number - 1 and last.form == form
        first = last.first if last is not None and follows else number
        self._last = _Call(ref(run), number, first, form)
        return PictureStep(number - first, len(run.timesteps), number == len(run.timesteps) - 1)
