"""optimize, restore, report: one call makes a pipeline fast, one brings it back, one says what was done and why."""

from rocm_sd.engine.approximation import Approximation, Skipping, preview
from rocm_sd.engine.capture import graphs_wanted
from rocm_sd.engine.denoising import captured_models
from rocm_sd.engine.installed import Installed
from rocm_sd.engine.levels import LEVELS
from rocm_sd.engine.memory import free_memory, is_out_of_memory
from rocm_sd.engine.optimization import (
    QUALITIES,
    optimize,
    optimize_with,
    prepare_plan,
    report,
    require_quality,
    restore,
)
from rocm_sd.engine.parts import EVERYTHING, Parts
from rocm_sd.engine.reporting import Report

__all__ = [
    "EVERYTHING", "LEVELS", "QUALITIES", "Approximation", "Installed", "Parts", "Report", "Skipping", "captured_models",
    "free_memory", "graphs_wanted", "is_out_of_memory", "optimize", "optimize_with", "prepare_plan", "preview",
    "report", "require_quality", "restore",
]  # fmt: skip
