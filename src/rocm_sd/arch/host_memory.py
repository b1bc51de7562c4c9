"""free() -> int | None: how much memory the host could give now, without swapping. Of Linux and its containers."""

from __future__ import annotations

from pathlib import Path

__all__ = ["free"]

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free() -> int | None:
    """Bytes; None where the system does not tell."""
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
