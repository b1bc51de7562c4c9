"""The machine that a record was made on, and the memory of a piece of work on it.

`machine` has card, driver and versions; nothing that names a person, a host or a folder. `PeakMemory` has the peak
above what was there before, and its course over time.
"""

from __future__ import annotations

import ctypes
import platform
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rocm_sd import __version__, arch
from rocm_sd.arch import host
from rocm_sd.bench.records import Machine
from rocm_sd.files import read_text

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PeakMemory", "Points", "machine"]

Points = list[list[float]]

PACKAGES = ("torch", "triton", "diffusers", "transformers")
_ROOT = Path("/")
# Often enough to see a VAE's peak in a picture of 300 ms, seldom enough to leave Python to the picture.
_SAMPLED_EVERY_S = 0.01
_MOST_POINTS = 200
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def machine(device: torch.device, *, root: Path = _ROOT) -> Machine:
    """`root` is where sys/ and proc/ are."""
    facts = arch.device_facts(device)
    is_cpu = facts.arch is arch.CPU
    driver = host.driver(facts.arch.vendor, root)
    return Machine(
        device=(_cpu_name(root) or facts.name) if is_cpu else facts.name,
        arch=facts.arch.name,
        compute_units=facts.compute_units if facts.compute_units is not None else facts.multiprocessors,
        memory_mib=None if facts.memory_bytes is None else facts.memory_bytes // 2**20,
        driver=f"{driver} of the kernel" if driver == host.UNVERSIONED else driver,
        system=host.system_name(platform.system(), platform.release()),
        versions=_versions(device),
    )


def _cpu_name(root: Path) -> str | None:
    """platform.processor() says x86_64 on most distributions."""
    for line in read_text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return None


def _versions(device: torch.device) -> dict[str, str]:
    found: dict[str, str | None] = {"rocm-sd": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        found[package] = host.installed(*(host.TRITON_PACKAGES if package == "triton" else (package,)))
    if device.type == "cuda":
        name, runtime = host.runtime(torch)
        found[name] = runtime
        number: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        on_rocm = name == "rocm"
        library = None if number is None else host.convolution_library(number, on_rocm=on_rocm)
        found["miopen" if on_rocm else "cudnn"] = library
    return {name: value for name, value in found.items() if value is not None}


class PeakMemory:
    """On a GPU what torch has allocated; on a CPU the resident set, where the system knows its peak (Linux)."""

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

    @contextmanager
    def over_time(self) -> Iterator[Points]:
        """[seconds, MiB] while it is held, filled at its end; the highest of neighbours where there are many."""
        points: Points = []
        taken: Points = []
        started, ended = time.perf_counter(), threading.Event()

        def sample() -> None:
            while not ended.wait(_SAMPLED_EVERY_S):
                now = self._read("VmRSS")
                if now is None or self._before is None:
                    return
                taken.append([time.perf_counter() - started, max(0.0, now - self._before)])

        sampler = threading.Thread(target=sample, daemon=True)
        sampler.start()
        try:
            yield points
        finally:
            ended.set()
            sampler.join()
            size = -(-len(taken) // _MOST_POINTS) or 1
            highest = (max(taken[n : n + size], key=lambda point: point[1]) for n in range(0, len(taken), size))
            points += [[round(seconds, 3), round(mib, 1)] for seconds, mib in highest]

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
