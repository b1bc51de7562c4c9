"""optimize, restore, report: one call makes a pipeline fast, one brings it back, one says what was done and why."""

from rocm_sd.engine.approximation import Approximation, Skipping, load_eight_bits, preview, save_eight_bits
from rocm_sd.engine.batch_parts import divide
from rocm_sd.engine.capture import graphs_wanted
from rocm_sd.engine.denoising import captured_models, follow_schedule
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
    tile,
)
from rocm_sd.engine.parts import EVERYTHING, Parts
from rocm_sd.engine.reporting import Report
from rocm_sd.engine.tiling import Tiles, tiles_of, untile
from rocm_sd.engine.verdict import count_replaced

__all__ = [
    "EVERYTHING", "LEVELS", "QUALITIES", "Approximation", "Installed", "Parts", "Report", "Skipping", "Tiles",
    "captured_models", "count_replaced", "divide", "follow_schedule", "free_memory", "graphs_wanted",
    "is_out_of_memory", "load_eight_bits", "optimize", "optimize_with", "prepare_plan", "preview", "report",
    "require_quality", "restore", "save_eight_bits", "tile", "tiles_of", "untile",
]  # fmt: skip
