"""Level 2: which implementation and which config. Numbers live in data/<arch>/<op>.json, never in Python.

`search` finds them on a card and `static` with none; both stand above `ops`. The rest is what an op asks, and below it.
"""

from rocm_sd.tuning.autotuning import AutotuningConfig, FindOptimalConfig
from rocm_sd.tuning.choice import Choice, Problem, lookup

__all__ = ["AutotuningConfig", "Choice", "FindOptimalConfig", "Problem", "lookup"]
