"""What is asked of a device: how much memory can be had now, what torch says when there was not enough, and whether a
graph is being captured.
"""

from __future__ import annotations

from pathlib import Path

import torch

__all__ = ["free_memory", "is_capturing", "is_out_of_memory", "release"]

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_memory(device: torch.device) -> int | None:
    """Bytes that an allocation could have: unused ones, and those that torch's allocator keeps; None if unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + kept)
    return _free_in_host() if device.type == "cpu" else None


def _free_in_host() -> int | None:
    known = [amount for amount in (_available(_MEMINFO), _left_in_group(_CGROUP)) if amount is not None]
    return min(known, default=None)


def _available(meminfo: Path) -> int | None:
    """What Linux would give without swapping, in its own estimate."""
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    for line in lines:
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def _left_in_group(folder: Path) -> int | None:
    """A container's own limit, which the estimate above knows nothing of. Cached files count as used in it."""
    try:
        limit, used = ((folder / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
        statistics = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    if not limit.isdigit():
        return None
    files = sum(int(line.split()[1]) for line in statistics if line.startswith(("inactive_file ", "active_file ")))
    return max(0, int(limit) - int(used) + files)


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # The host's allocator has no error of its own.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def release(device: torch.device) -> None:
    """Give what torch's allocator keeps back to the device, so that it can be cut anew."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
