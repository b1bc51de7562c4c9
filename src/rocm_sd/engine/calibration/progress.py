"""What a user sees while the card is measured: one line that moves on a terminal, one sentence in a log."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

from rocm_sd.engine.calibration.calibrating import BUDGET_S, Calibration, calibrate

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import nn

    from rocm_sd.engine.calibration.trials import Prepare

__all__ = ["measure_with_progress"]

log = logging.getLogger("rocm_sd")
_WIDTH = 100


def measure_with_progress(
    model: nn.Module,
    key: str,
    call: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device: torch.device,
    prepare: Prepare,
) -> Calibration:
    """`calibrate`, as it is at a first picture."""
    kind, on_terminal = type(model).__name__, sys.stderr.isatty()
    if not on_terminal:
        log.warning("measuring your card for %s, once: up to %.0f s (ROCM_SD_CALIBRATE=0 skips it)", kind, BUDGET_S)

    def show(what: str, spent: float, budget: float) -> None:
        if on_terminal:
            line = f"measuring your card for {kind}, once: {spent:.0f} of {budget:.0f} s ({what})"
            sys.stderr.write(f"\r{line[:_WIDTH]:<{_WIDTH}}")
            sys.stderr.flush()

    try:
        return calibrate(model, key, call, args, kwargs, device, prepare, progress=show)
    finally:
        if on_terminal:
            sys.stderr.write(f"\r{'':<{_WIDTH}}\r")
            sys.stderr.flush()
