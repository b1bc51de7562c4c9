"""Runs HIP kernels on a card: `launcher_for(device)` is what an op's implementation hands to its launcher.

A kernel is compiled when it is first launched, by clang, else by the compiler in ROCm's libraries, and kept on disk;
its module stays loaded until `unload`. A launch that finds its kernel loaded allocates nothing and waits for nothing,
so a graph can capture it; a kernel that is not loaded yet is refused while a graph is captured.
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rocm_sd import arch as archs
from rocm_sd.errors import InvalidCodeObject, Unsupported
from rocm_sd.kernels.elf import Sections
from rocm_sd.kernels.hip import rtc, toolchain
from rocm_sd.kernels.hip.driver import CUDA, HIP, Driver, LoadFailed, NoDriver, driver_for
from rocm_sd.kernels.hip.launch import HipRefused, HipUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rocm_sd.arch import Arch
    from rocm_sd.kernels.hip.launch import Argument, Kernel

__all__ = [
    "DeviceLauncher",
    "NotWhileCapturing",
    "compile_image",
    "launcher_for",
    "tagged",
    "threads_of",
    "why_not",
]

_TAG = re.compile(r"defined\(__(gfx\w+)__\)")
_SLOT = 8  # bytes


class NotWhileCapturing(HipUnavailable):
    """Loading may allocate and wait, which would spoil the graph."""

    lasting = False
    reported = False


class Card(Protocol):
    """What torch says of one device. `index` is -1 for memory of the host, as torch counts."""

    @property
    def index(self) -> int: ...

    def stream(self) -> int:
        """The handle of the stream that torch queues work on now."""
        ...

    def is_capturing(self) -> bool: ...

    def current(self) -> AbstractContextManager[object]:
        """The driver means this device within."""
        ...


@dataclass(frozen=True)
class TorchCard:
    index: int

    def stream(self) -> int:
        # As Triton asks: through an object of torch's it takes 2 us.
        return int(torch._C._cuda_getCurrentRawStream(self.index))  # noqa: SLF001

    def is_capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def current(self) -> AbstractContextManager[object]:
        return nullcontext() if torch.cuda.current_device() == self.index else torch.cuda.device(self.index)


@dataclass(frozen=True)
class _Loaded:
    function: int
    threads: int
    name: str


class DeviceLauncher:
    """A `Launcher` for one device. Threads may share it."""

    def __init__(
        self,
        arch: Arch,
        card: Card,
        driver: Driver,
        compile_: Callable[[Kernel, Arch], bytes] | None = None,
    ) -> None:
        self.arch = arch
        self._card, self._driver, self._compile = card, driver, compile_ or compile_image
        self._loaded: dict[Kernel, _Loaded] = {}
        # By the very image that a driver was given: it may read from there until the module is unloaded.
        self._modules: dict[bytes, int] = {}
        self._lock = threading.Lock()
        self._of_thread = _OfThread()

    def launch(self, kernel: Kernel, grid: tuple[int, int, int], arguments: Sequence[Argument]) -> None:
        """On torch's current stream."""
        loaded = self._loaded.get(kernel) or self.load(kernel)
        parameters = self._parameters(len(arguments))
        self._pack(kernel, arguments, parameters.values)
        with self._card.current():
            self._driver.prepare(self._card.index)
            stream = self._card.stream()
            self._driver.launch(loaded.function, grid, loaded.threads, stream, parameters.pointers, loaded.name)

    def load(self, kernel: Kernel) -> _Loaded:
        """Compile and load it, so that a launch, inside a graph's capture too, finds it there."""
        with self._lock:
            known = self._loaded.get(kernel)
            if known is not None:
                return known
            if self._card.is_capturing():
                raise NotWhileCapturing(
                    f"{self._name_of(kernel)} is not loaded, and none is while a graph is being captured.",
                    hint="Make the call once before the capture.",
                )
            # PTX is a text that ends with a zero; an ELF file is not hurt by one.
            image = self._compile(kernel, self.arch) + b"\0"
            threads = threads_of(image, kernel.name)
            with self._card.current():
                self._driver.prepare(self._card.index)
                if image not in self._modules:
                    self._modules[image] = self._driver.load(image, self._name_of(kernel))
                function = self._driver.function(self._modules[image], kernel.name, self._name_of(kernel))
            loaded = self._loaded[kernel] = _Loaded(function, threads, self._name_of(kernel))
            return loaded

    def unload(self) -> None:
        """Give back what the modules take of the card. What still runs, and captured graphs, must be done with them."""
        with self._lock, self._card.current():
            self._driver.prepare(self._card.index)
            self._loaded.clear()
            for image in list(self._modules):
                self._driver.unload(self._modules[image])
                del self._modules[image]

    def _name_of(self, kernel: Kernel) -> str:
        return f"{kernel.name} for {self.arch.name}"

    def _parameters(self, count: int) -> _Parameters:
        """Made once for each thread: the driver copies the values before a launch returns."""
        known = self._of_thread.by_count
        found = known.get(count)
        if found is None:
            found = known[count] = _Parameters(count)
        return found

    def _pack(self, kernel: Kernel, arguments: Sequence[Argument], into: Any) -> None:
        """Each value at the beginning of a slot of its own: one call where an object for each would take longer."""
        kinds = ["<"]
        values: list[int | float] = []
        index = self._card.index
        for place, value in enumerate(arguments):
            if isinstance(value, torch.Tensor):
                if value.get_device() != index:
                    # A kernel that reads it would end every other work on the card, too.
                    raise Unsupported(kernel.name, f"a tensor on {value.device} as argument {place} on another device")
                kinds.append("Q")
                values.append(value.data_ptr())
            elif value is None:
                kinds.append("Q")
                values.append(0)
            else:
                kinds.append("f4x" if isinstance(value, float) else "i4x")
                values.append(value)
        try:
            struct.pack_into("".join(kinds), into, 0, *values)
        except (struct.error, OverflowError):
            raise HipRefused(kernel.name, f"the arguments {values}: one of them passes 32 bits") from None


class _Parameters:
    """Room for the values of a launch, and the addresses of all of them, as a driver wants them."""

    def __init__(self, count: int) -> None:
        self.values = ctypes.create_string_buffer(max(count, 1) * _SLOT)
        first = ctypes.addressof(self.values)
        self.pointers = (ctypes.c_void_p * count)(*range(first, first + _SLOT * count, _SLOT))


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.by_count: dict[int, _Parameters] = {}


def compile_image(kernel: Kernel, arch: Arch) -> bytes:
    """By clang where there is one, else by hiprtc, or nvrtc on NVIDIA; from the cache where it was compiled before."""
    parameters = dict(kernel.parameters)
    try:
        return toolchain.compile_source(kernel.source, arch, parameters).elf
    except toolchain.NoHipCompiler as no_clang:
        try:
            library = rtc.rtc_for(rtc.api_for(arch))
        except NoDriver as none:
            raise toolchain.NoHipCompiler(f"{no_clang.message} {none.message}", hint=no_clang.hint) from None
        return rtc.compile_source(library, kernel.source, arch, parameters)


def threads_of(image: bytes, kernel: str) -> int:
    """The size of a workgroup, which is part of the kernel: of an ELF file by its metadata, of PTX by its directive."""
    try:
        if image[:4] == b"\x7fELF":
            entries = Sections(image).metadata()["amdhsa.kernels"]
            found = [entry[".max_flat_workgroup_size"] for entry in entries if entry[".name"] == kernel]
        else:
            directive = rf"\.entry\s+{re.escape(kernel)}\s*\([^{{]*?\.(?:max|req)ntid\s+(\d+)"
            found = [int(size) for size in re.findall(directive, image.decode())]
    except (InvalidCodeObject, KeyError, TypeError, UnicodeDecodeError, struct.error) as error:
        raise LoadFailed(f"What was compiled for {kernel} cannot be read: {error}.") from None
    if not found:
        raise LoadFailed(f"What was compiled has no kernel {kernel} with a size of its workgroups.")
    return int(found[0])


@cache
def tagged() -> tuple[str, ...]:
    """Each gfx that arch.hpp has a tag for: the sources compile for no other."""
    return tuple(_TAG.findall((toolchain.INCLUDE / "rocm_sd" / "arch.hpp").read_text(encoding="utf-8")))


def launcher_for(device: torch.device) -> DeviceLauncher:
    """One for each device, with the modules that are loaded there. Ask `why_not` first."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    return _launcher(index)


@cache
def _launcher(index: int) -> DeviceLauncher:
    api = HIP if torch.version.hip is not None else CUDA
    return DeviceLauncher(archs.detect(torch.device("cuda", index)), TorchCard(index), driver_for(api))


def why_not(device: torch.device) -> str | None:
    """The reason that HIP kernels cannot run on this GPU, or None if they can."""
    if torch.version.hip is None:
        return "this torch is not built for ROCm"
    return _why_not(archs.detect(device).name)


@cache
def _why_not(gfx: str) -> str | None:
    if gfx not in tagged():
        return f"the HIP kernels have no code for {gfx}"
    try:
        driver_for(HIP)
        toolchain.find_compiler()
    except toolchain.NoHipCompiler as no_clang:
        try:
            rtc.rtc_for(rtc.HIPRTC)
        except NoDriver:
            return f"{_reason(no_clang)}, nor hiprtc"
    except HipUnavailable as error:
        return _reason(error)
    return None


def _reason(error: HipUnavailable) -> str:
    """Its sentence, to stand after "because"."""
    return error.message[:1].lower() + error.message[1:].rstrip(".")
