"""optimize, restore, report: one call makes a pipeline fast, one brings it back, one says what was done and why."""

from rocm_sd.engine.optimization import LEVELS, QUALITIES, optimize, report, restore
from rocm_sd.engine.reporting import Report

__all__ = ["LEVELS", "QUALITIES", "Report", "optimize", "report", "restore"]
