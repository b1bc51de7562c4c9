"""More than one GPU: a pipeline split over the processes of a job, by strategies that know no model.

Each strategy is a table of what is split, and what is sent where: `data`, `cfg`, `pipeline`, `patch` and `tensor`.
"""

from rocm_sd.parallel.one_process import ModelParallelAttention, MultiGPUCoordinator
from rocm_sd.parallel.parallelizing import ParallelReport, parallel_report, parallelize, share_out, unparallelize
from rocm_sd.parallel.plans import STRATEGIES, Plan, choose, parse
from rocm_sd.parallel.ranks import Ranks, Traffic, join, leave

__all__ = [
    "STRATEGIES", "ModelParallelAttention", "MultiGPUCoordinator", "ParallelReport", "Plan", "Ranks",
    "Traffic", "choose", "join", "leave", "parallel_report", "parallelize", "parse", "share_out", "unparallelize",
]  # fmt: skip
