"""One run of a schedule: from `set_timesteps` to the next one."""

from __future__ import annotations

import torch

__all__ = ["ScheduleRun"]


class ScheduleRun:
    """`timesteps` as the scheduler has them. Pipelines loop over views of this tensor: a timestep is known by where it
    lies, without waiting for the device to tell its value.
    """

    def __init__(self, timesteps: torch.Tensor) -> None:
        self.timesteps = timesteps
        # Read before the run's first launch: later, the host would wait for the GPU.
        self.values: list[float] = timesteps.tolist()
        self._version = None if timesteps.is_inference() else timesteps._version  # noqa: SLF001

    def is_last(self, timestep: object) -> bool:
        return self.number_of(timestep) == len(self.timesteps) - 1

    def number_of(self, timestep: object) -> int | None:
        """Which of the schedule's timesteps this is; None where it is not one of them."""
        ours = self.timesteps
        if not isinstance(timestep, torch.Tensor) or timestep.numel() != 1 or timestep.dtype != ours.dtype:
            return None
        if self._version is None or ours._version != self._version or ours.dim() != 1:  # noqa: SLF001
            return None
        if timestep.device != ours.device or timestep.untyped_storage().data_ptr() != ours.untyped_storage().data_ptr():
            return None
        number, rest = divmod(int(timestep.storage_offset() - ours.storage_offset()), max(ours.stride(0), 1))
        return number if not rest and 0 <= number < len(ours) else None
