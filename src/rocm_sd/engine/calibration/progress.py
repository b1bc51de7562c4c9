"""What a user sees while the card is measured: one line that moves on a terminal, one sentence in a log."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from rocm_sd.engine.calibration.calibrating import BUDGET_S, Calibration, calibrate

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from rocm_sd.engine.calibration.subjects import Subject
    from rocm_sd.engine.calibration.trials import Prepare

__all__ = ["measure_with_progress"]

log = logging.getLogger("rocm_sd")
_WIDTH = 100


def measure_with_progress(
    subjects: Sequence[Subject], device: torch.device, prepare: Prepare, *, graphs: bool
) -> Calibration:
    """`calibrate`, as it is at a first picture."""
    what = " and ".join(type(subject.model).__name__ for subject in subjects)
    on_terminal = sys.stderr.isatty()
    if not on_terminal:
        log.warning("measuring your card for %s, once: up to %.0f s (ROCM_SD_CALIBRATE=0 skips it)", what, BUDGET_S)

    def show(step: str, spent: float, budget: float) -> None:
        if on_terminal:
            line = f"measuring your card, once: {spent:.0f} of {budget:.0f} s ({step})"
            sys.stderr.write(f"\r{line[:_WIDTH]:<{_WIDTH}}")
            sys.stderr.flush()

    try:
        return calibrate(subjects, device, prepare, graphs=graphs, progress=show)
    finally:
        if on_terminal:
            sys.stderr.write(f"\r{'':<{_WIDTH}}\r")
            sys.stderr.flush()
