"""What a measurement depends on, the problem aside: the card, its driver, and every library that compiles or computes.

A measurement is used only where all of it is the same. The kernel's own source is the other half of the key.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rocm_sd import arch
from rocm_sd.arch import host
from rocm_sd.files import read_text
from rocm_sd.plain_json import parsed
from rocm_sd.typed_json import read

if TYPE_CHECKING:
    import torch

__all__ = ["Environment", "current", "driver", "kernel_hash"]

_IMPORTED = re.compile(rb"^\s*(?:from|import)\s+(rocm_sd\.kernels\.[\w.]+)", re.MULTILINE)
_LAUNCHED = re.compile(rb'\bKernel\(\s*"(\w+)"')
_ROOT = Path("/")
# "amdgpu of Linux 6.8.0-45-generic" up to the series.
_RELEASE = re.compile(rf"({host.UNVERSIONED} of Linux \d+\.\d+)\b.+")


@dataclass(frozen=True)
class Environment:
    """None is what could not be found out, or what is not there; it equals only itself.

    `driver` is "nvidia 580.82.07", "amdgpu 6.10.5" of AMD's own package, or "amdgpu of Linux 6.8" of one that came with
    the kernel: with its series alone, since a distribution's updates leave a driver as it is but for repairs. One that
    was written down with the whole release is taken for that.
    `runtime` is "rocm 7.1.0" or "cuda 13.0". `miopen` is the convolution library: on CUDA it is cuDNN, and says so.
    """

    arch: str
    compute_units: int | None
    driver: str | None
    runtime: str | None
    torch: str
    triton: str | None
    miopen: str | None

    def __post_init__(self) -> None:
        release = _RELEASE.match(self.driver or "")
        if release is not None:
            object.__setattr__(self, "driver", release[1])

    def key(self) -> str:
        """One text for one environment, the same in every process; `from_key` reads it."""
        return _key(self)

    @classmethod
    def from_key(cls, key: str) -> Environment:
        return _from_key(key)


@lru_cache(maxsize=64)
def _key(environment: Environment) -> str:
    return json.dumps(asdict(environment), sort_keys=True, separators=(",", ":"))


@lru_cache(maxsize=64)
def _from_key(key: str) -> Environment:
    return read(Environment, parsed(key), top="the environment")


def current(device: object = None) -> Environment:
    """The environment of `device` ("cuda:1", torch.device, "cpu"); None means torch's current GPU, or else the CPU."""
    import torch  # noqa: PLC0415 -- importing this module needs none

    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    asked = torch.device(device)  # type: ignore[call-overload]
    if asked.type == "cuda" and asked.index is None:
        asked = torch.device("cuda", torch.cuda.current_device())
    return _current(asked, arch.emulated())


@cache
def _current(device: torch.device, _emulated: object) -> Environment:
    import torch  # noqa: PLC0415

    facts = arch.device_facts(device)
    runtime = library = None
    if device.type == "cuda":
        runtime = " ".join(map(str, host.runtime(torch)))
        convolutions: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        if convolutions is not None:
            library = f"cudnn {convolutions}" if torch.version.hip is None else str(convolutions)
    return Environment(
        arch=facts.arch.name,
        compute_units=facts.compute_units if facts.compute_units is not None else facts.multiprocessors,
        driver=driver(facts.arch.vendor),
        runtime=runtime,
        torch=torch.__version__,
        triton=host.installed(*host.TRITON_PACKAGES),
        miopen=library,
    )


def driver(vendor: arch.Vendor, root: Path = _ROOT) -> str | None:
    """The driver by name and version, as the kernel says under sys/ and proc/ of `root`."""
    found = host.driver(vendor, root)
    if found != host.UNVERSIONED:
        return found
    # It changes with the kernel's series.
    series = re.match(r"\d+\.\d+", read_text(root / "proc/sys/kernel/osrelease"))
    return f"{found} of Linux {series[0]}" if series else None


@cache
def kernel_hash(module: str) -> str:
    """The hash of a kernel module's source and of every kernel module that it imports; nothing is imported for it.

    A HIP launcher's has the device code that it names in `Kernel(...)` and every header, too. The dataclass of its
    configs stands in the same file. Where there are no sources (a frozen program), the version of rocm-sd stands for
    them.
    """
    digest = hashlib.sha256()
    waiting, seen = [module], set()
    while waiting:
        name = waiting.pop(0)
        if name in seen:
            continue
        seen.add(name)
        spec = find_spec(name)
        file = None if spec is None or spec.origin is None else Path(spec.origin)
        source = None if file is None else _bytes(file)
        if file is None or source is None:
            return f"rocm-sd {host.installed('rocm-sd')}"
        digest.update(name.encode() + b"\0" + source + b"\0")
        for part in _device_code(file, source):
            digest.update(part.name.encode() + b"\0" + (_bytes(part) or b"") + b"\0")
        waiting += sorted({found.decode() for found in _IMPORTED.findall(source)})
    return digest.hexdigest()[:16]


def _device_code(launcher: Path, source: bytes) -> list[Path]:
    named = dict.fromkeys(launcher.parent / "sources" / f"{name.decode()}.hip" for name in _LAUNCHED.findall(source))
    found = [file for file in named if file.is_file()]
    return [*found, *sorted((launcher.parent / "include").rglob("*.hpp"))] if found else []


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
