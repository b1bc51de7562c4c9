"""A run of the denoising loop: which timestep a call is at, and the scheduler's steps from a table on the device."""

from rocm_sd.engine.schedule.ownership import own_on_instance
from rocm_sd.engine.schedule.stepping import SchedulerHook, ScheduleRun, hook

__all__ = ["ScheduleRun", "SchedulerHook", "hook", "own_on_instance"]
