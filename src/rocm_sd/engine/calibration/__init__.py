"""The user's own card decides: which plan a model runs by is measured once, at its first picture, in a worker."""

from rocm_sd.engine.calibration.calibrating import Calibration, calibrate
from rocm_sd.engine.calibration.drawn import DrawnCall, note, noted, with_tensors
from rocm_sd.engine.calibration.first_calls import counts, install, wanted
from rocm_sd.engine.calibration.plan_times import timing_plans
from rocm_sd.engine.calibration.plans import CHANNELS_LAST, OP, PLANS, Plan, kernels_hash, measured, named
from rocm_sd.engine.calibration.progress import measure_with_progress
from rocm_sd.engine.calibration.skeleton import Skeleton, described_call, model_key
from rocm_sd.engine.calibration.subjects import CannotBeRebuilt, NotMeasured, Outline, Subject
from rocm_sd.engine.calibration.tracing import trace_call

__all__ = [
    "CHANNELS_LAST", "OP", "PLANS", "Calibration", "CannotBeRebuilt", "DrawnCall", "NotMeasured", "Outline", "Plan",
    "Skeleton", "Subject", "calibrate", "counts", "described_call", "install", "kernels_hash", "measure_with_progress",
    "measured", "model_key", "named", "note", "noted", "timing_plans", "trace_call", "wanted", "with_tensors",
]  # fmt: skip
