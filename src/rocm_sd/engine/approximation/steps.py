"""Which step of a run a call of a model is, by its timestep and without waiting for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rocm_sd.engine.schedule import ScheduleRun

__all__ = ["number_of"]

# What Flux's pipelines divide a timestep by.
_FLUX_TIMESTEPS = 1000


def number_of(run: ScheduleRun, scheduler: Any, timestep: object) -> int | None:
    """None where it is not one of the run's. A timestep is one of the scheduler's own, for all samples at once, or
    computed from it: that one is told by the steps that the scheduler has counted.
    """
    if not isinstance(timestep, torch.Tensor):
        return None
    # SD3's pipelines expand it: the same place in memory for each sample.
    expanded = timestep.dim() == 1 and len(timestep) > 0 and (len(timestep) == 1 or timestep.stride(0) == 0)
    number = run.number_of(timestep[0] if expanded else timestep)
    return _counted(run, scheduler, timestep) if number is None and timestep.dim() == 1 else number


def _counted(run: ScheduleRun, scheduler: Any, timestep: torch.Tensor) -> int | None:
    number = getattr(scheduler, "step_index", None)
    # Before the first step it has counted nothing, and knows where it will begin.
    number = getattr(scheduler, "begin_index", None) if number is None else number
    if not isinstance(number, int) or not 0 <= number < len(run.timesteps) or not timestep.is_floating_point():
        return None
    ours = run.timesteps[number]
    if run.number_of(ours) != number or timestep.device != ours.device:
        return None
    # On a GPU, to look would be to wait.
    if ours.device.type == "cpu" and not bool((timestep == ours.to(timestep.dtype) / _FLUX_TIMESTEPS).all()):
        return None
    return number
