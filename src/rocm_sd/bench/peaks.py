"""Peak memory of a piece of work, above what was there before it."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

__all__ = ["PeakMemory"]

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """On a GPU what torch has allocated; on a CPU the resident set, where the system tells its peak (Linux)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cpu":
            _give_back()
        self._tells = self._reset()
        self._before = self._read("VmRSS")

    def mib(self) -> float | None:
        """The peak since the last call, above what was there when this was made."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        peak = self._read("VmHWM") if self._tells else None
        self._tells = self._reset()
        return None if peak is None or self._before is None else max(0.0, peak - self._before)

    def _reset(self) -> bool:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return True
        try:
            # Of proc(5): 5 sets the peak of the resident set to what it is now.
            _CLEAR.write_text("5")
        except OSError:
            return False
        return True

    def _read(self, field: str) -> float | None:
        if self._device.type == "cuda":
            peak = field == "VmHWM"
            allocated = torch.cuda.max_memory_allocated if peak else torch.cuda.memory_allocated
            return float(allocated(self._device)) / 2**20
        try:
            lines = _STATUS.read_text().splitlines()
        except OSError:
            return None
        return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:")), None)


def _give_back() -> None:
    """What was freed before stays resident in the C library's heap, and using it again would not show as growth."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        # Another C library than glibc: then memory that is used again is not counted.
        return
