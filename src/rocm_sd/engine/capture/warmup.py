"""Kernels compiled side by side before a model's first run, where there are kernels to compile."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from rocm_sd import workers
from rocm_sd.kernels import triton as triton_kernels
from rocm_sd.ops.registry import note_self_tests
from rocm_sd.ops.samples import dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

__all__ = ["compile_kernels", "start_compiling"]

log = logging.getLogger(__name__)

# Weights of other dtypes are turned to one of these layer by layer, and which one is the model's own affair.
_TESTED = frozenset({torch.float16, torch.bfloat16, torch.float32})


def _compiles(device: torch.device) -> bool:
    return device.type == "cuda" and triton_kernels.why_not(device) is None


def start_compiling(device: torch.device, *, tests: bool = True) -> None:
    """What compiles kernels, and what tests them, takes seconds to come up: it may do so while others prepare."""
    # Triton's driver, whose part in C is built at its first use, is for later.
    if device.type == "cuda" and triton_kernels.why_not_compiled(device) is None:
        _started()
    if tests and _compiles(device):
        from rocm_sd.ops import self_test  # noqa: PLC0415 -- as in compile_kernels

        self_test.start(device)


def compile_kernels(run: Callable[[], object], device: torch.device, dtype: torch.dtype) -> None:
    """Run it once for the kernels that it launches alone: what it computes is garbage. `dtype`: the model's."""
    precompile = _started() if _compiles(device) else None
    if precompile is not None:
        with precompile.precompiling() as done:
            run()
            # The scheduler's step and the VAE come later, each with ops to be tested before their first use. A worker
            # runs one model, and nothing after it.
            if dtype in _TESTED and not workers.inside():
                note_self_tests(dtype_name(dtype), device)
        from rocm_sd.ops import self_test  # noqa: PLC0415 -- where nothing is compiled, nothing was noted

        self_test.catch_up()
        if done.compiled:
            log.info("%s", done)


def _started() -> ModuleType | None:
    """The module that compiles ahead; None where this Triton lacks what it needs, and kernels are compiled as met."""
    try:
        precompile = import_module("rocm_sd.kernels.triton.precompile")
        precompile.get_ready()
        # Later on little is new, and the process is started when something is.
        if not precompile.has_compiled() or workers.inside():
            precompile.start()
    except Exception as error:  # noqa: BLE001 -- an old Triton, or one with parts missing
        _say_once(f"Kernels are not compiled ahead, but as they are met ({triton_kernels.sentence(error)}).")
        return None
    return precompile


@cache
def _say_once(sentence: str) -> None:
    log.warning(sentence)
