"""A run of the denoising loop: which timestep a call is at, and the scheduler's steps from a table on the device."""

from rocm_sd.engine.schedule.runs import ScheduleRun
from rocm_sd.engine.schedule.stepping import SchedulerHook, hook

__all__ = ["ScheduleRun", "SchedulerHook", "hook"]
