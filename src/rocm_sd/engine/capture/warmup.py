"""Kernels compiled side by side before a model's first run, where there are kernels to compile."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from rocm_sd.kernels import triton as triton_kernels
from rocm_sd.ops.registry import note_self_tests
from rocm_sd.ops.samples import dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["compile_kernels", "start_compiling"]

log = logging.getLogger(__name__)

# Weights of other dtypes are turned to one of these layer by layer, and which one is the model's own affair.
_TESTED = frozenset({torch.float16, torch.bfloat16, torch.float32})


def _compiles(device: torch.device) -> bool:
    return device.type == "cuda" and triton_kernels.why_not(device) is None


def start_compiling(device: torch.device) -> None:
    """What compiles kernels takes seconds to come up: it may do so while other things are prepared."""
    if _compiles(device):
        from rocm_sd.kernels.triton import precompile  # noqa: PLC0415 -- needs Triton

        precompile.start()
        from rocm_sd.ops import self_test  # noqa: PLC0415 -- as in compile_kernels

        self_test.start(device)


def compile_kernels(run: Callable[[], object], device: torch.device, dtype: torch.dtype) -> None:
    """Run it once for the kernels that it launches alone: what it computes is garbage. `dtype`: the model's."""
    if _compiles(device):
        from rocm_sd.kernels.triton import precompile  # noqa: PLC0415 -- needs Triton

        with precompile.precompiling() as done:
            run()
            # The scheduler's step and the VAE come later, each with ops to be tested before their first use.
            if dtype in _TESTED:
                note_self_tests(dtype_name(dtype), device)
        from rocm_sd.ops import self_test  # noqa: PLC0415 -- where nothing is compiled, nothing was noted

        self_test.catch_up()
        if done.compiled:
            log.info("%s", done)
