"""The user's own card decides: which plan a model runs by is measured once, at its first picture, in a worker."""

from rocm_sd.engine.calibration.calibrating import Calibration, CannotBeRebuilt, NotMeasured, Subject, calibrate
from rocm_sd.engine.calibration.first_calls import install, wanted
from rocm_sd.engine.calibration.plans import OP, PLANS, Plan, measured, named
from rocm_sd.engine.calibration.progress import measure_with_progress
from rocm_sd.engine.calibration.skeleton import described_call, model_key

__all__ = [
    "OP", "PLANS", "Calibration", "CannotBeRebuilt", "NotMeasured", "Plan", "Subject", "calibrate", "described_call",
    "install", "measure_with_progress", "measured", "model_key", "named", "wanted",
]  # fmt: skip
