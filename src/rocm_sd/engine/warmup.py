"""Kernels compiled side by side before a model's first run, where there are kernels to compile."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rocm_sd.kernels import triton as triton_kernels

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["compile_kernels", "start"]

log = logging.getLogger(__name__)


def _compiles(device: torch.device) -> bool:
    return device.type == "cuda" and triton_kernels.why_not(device) is None


def start(device: torch.device) -> None:
    """What compiles kernels takes seconds to come up: it may do so while other things are prepared."""
    if _compiles(device):
        from rocm_sd.kernels.triton import precompile  # noqa: PLC0415 -- needs Triton

        precompile.start()


def compile_kernels(run: Callable[[], object], device: torch.device) -> None:
    """Run it once for the kernels that it launches alone: what it computes is garbage."""
    if _compiles(device):
        from rocm_sd.kernels.triton import precompile  # noqa: PLC0415 -- needs Triton

        with precompile.precompiling() as done:
            run()
        if done.compiled:
            log.info("%s", done)
