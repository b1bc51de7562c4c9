"""The worker processes that compile for AMD GPUs, and those that run Triton's interpreter: never one for both."""

from __future__ import annotations

import atexit
from functools import cache

from rocm_sd.workers import Pool

__all__ = ["pool"]


@cache
def pool(*, interpret: bool = False, size: int | None = None) -> Pool:
    """The one of this process for either purpose, of as many workers as cores or as are asked for."""
    environment = {
        "TRITON_INTERPRET": "1" if interpret else None,
        # Workers on all cores: threads inside them would only wait for one another.
        "OMP_NUM_THREADS": "1",
        "TRITON_DEFAULT_FP_FUSION": "1",
        "TRITON_ALWAYS_COMPILE": "1",
    }
    made = Pool(size, environment, folder="TRITON_CACHE_DIR")
    atexit.register(made.close)
    return made
