"""The functions of a GPU's driver library that load and launch machine code, through ctypes.

HIP and CUDA have the same functions under two names: `HIP` is what this project is for, `CUDA` lets the same loader be
proven on a card of the other vendor.
"""

from __future__ import annotations

import ctypes
import re
import threading
from contextlib import suppress
from ctypes import POINTER, byref, c_char_p, c_int, c_uint, c_void_p
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocm_sd import settings
from rocm_sd.errors import RocmSdError
from rocm_sd.kernels.hip.launch import HipUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "CUDA",
    "HIP",
    "Api",
    "Driver",
    "LaunchFailed",
    "LoadFailed",
    "NoDriver",
    "driver_for",
    "open_library",
    "torch_folders",
]

# The same numbers in both: hipErrorOutOfMemory, hipErrorNoBinaryForGpu.
OUT_OF_MEMORY = 2
NO_BINARY_FOR_GPU = 209


class NoDriver(HipUnavailable):
    """There is no library that loads code into a GPU, or it has not the functions of one."""


class LoadFailed(HipUnavailable):
    """The driver refused machine code, or had no memory for it."""


class LaunchFailed(RocmSdError):
    """The driver refused a launch, or reported a fault of an earlier one."""


@dataclass(frozen=True)
class Api:
    """One vendor's names for functions of one shape. `returns_text`: whether an error's name is a function's value."""

    name: str
    stem: str
    versions: tuple[str, ...]
    prefix: str
    launch: str
    returns_text: bool

    @property
    def load(self) -> str:
        return f"{self.prefix}ModuleLoadData"

    @property
    def function(self) -> str:
        return f"{self.prefix}ModuleGetFunction"

    @property
    def unload(self) -> str:
        return f"{self.prefix}ModuleUnload"


HIP = Api("HIP", "libamdhip64", ("", ".7", ".6", ".5"), "hip", "hipModuleLaunchKernel", returns_text=True)
CUDA = Api("CUDA", "libcuda", (".1",), "cu", "cuLaunchKernel", returns_text=False)
_MAPS = Path("/proc/self/maps")


class Driver:
    """Each call is checked: what the driver answers becomes a sentence."""

    def __init__(self, api: Api, library: ctypes.CDLL) -> None:
        self.api = api
        try:
            self._load = _typed(library, api.load, POINTER(c_void_p), c_void_p)
            self._function = _typed(library, api.function, POINTER(c_void_p), c_void_p, c_char_p)
            sizes = (c_uint,) * 7
            self._launch = _typed(library, api.launch, c_void_p, *sizes, c_void_p, POINTER(c_void_p), c_void_p)
            self._unload = _typed(library, api.unload, c_void_p)
            self._texts = [_text_function(library, name, api) for name in ("GetErrorName", "GetErrorString")]
            self._context = None if api is HIP else _Context(library)
        except AttributeError as error:
            raise NoDriver(f"The library {library._name} is no {api.name} driver: {error}.") from None  # noqa: SLF001

    def load(self, image: bytes, what: str) -> int:
        """A module of machine code, or of PTX text that ends with a zero, on the device that is current.

        `what` is named where it fails. The driver may read the image for as long as the module is loaded: keep it.
        """
        module = c_void_p()
        self._loaded(self._load(byref(module), image), self.api.load, what)
        return module.value or 0

    def function(self, module: int, name: str, what: str) -> int:
        function = c_void_p()
        self._loaded(self._function(byref(function), module, name.encode()), self.api.function, what)
        return function.value or 0

    def launch(
        self, function: int, grid: tuple[int, int, int], threads: int, stream: int, parameters: Any, what: str
    ) -> None:
        """Of `threads` in a row each, with no LDS beside what the kernel declares. The driver copies the parameters."""
        code = self._launch(function, *grid, threads, 1, 1, 0, stream, parameters, None)
        if code:
            raise LaunchFailed(self._sentence(code, self.api.launch, what))

    def unload(self, module: int) -> None:
        code = self._unload(module)
        if code:
            raise LaunchFailed(self._sentence(code, self.api.unload, "a module"))

    def prepare(self, index: int) -> None:
        """A thread that has not used the device yet has no context of it; HIP gives it one by itself."""
        if self._context is not None:
            self._loaded(self._context.prepare(index), "cuCtxSetCurrent", f"device {index}")

    def _loaded(self, code: int, function: str, what: str) -> None:
        if code:
            hint = None
            if code == NO_BINARY_FOR_GPU:
                hint = "It was compiled for another GPU: see HSA_OVERRIDE_GFX_VERSION, and type: rocm-sd info"
            elif code == OUT_OF_MEMORY:
                hint = "Free some of the GPU's memory."
            raise LoadFailed(self._sentence(code, function, what), hint=hint)

    def _sentence(self, code: int, function: str, what: str) -> str:
        name, text = (found(code) for found in self._texts)
        return (
            f"{function} of {what} failed: {name or 'error'} ({code}), {text or 'which the driver does not explain'}."
        )


class _Context:
    """CUDA's own: the context that torch uses on a device is the primary one, and belongs to threads one by one."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._current = _typed(library, "cuCtxGetCurrent", POINTER(c_void_p))
        self._retain = _typed(library, "cuDevicePrimaryCtxRetain", POINTER(c_void_p), c_int)
        self._set = _typed(library, "cuCtxSetCurrent", c_void_p)
        self._ready = threading.local()

    def prepare(self, index: int) -> int:
        if getattr(self._ready, "done", False):
            return 0
        context = c_void_p()
        code = self._current(byref(context))
        if not code and not context.value:
            code = self._retain(byref(context), index) or self._set(context)
        self._ready.done = not code
        return int(code)


def _typed(library: ctypes.CDLL, name: str, *arguments: Any) -> Any:
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, c_int
    return function


def _text_function(library: ctypes.CDLL, name: str, api: Api) -> Any:
    function = getattr(library, api.prefix + name)
    if api.returns_text:
        function.argtypes, function.restype = (c_int,), c_char_p
        return lambda code: (function(code) or b"").decode(errors="replace")
    function.argtypes, function.restype = (c_int, POINTER(c_char_p)), c_int

    def text(code: int) -> str:
        found = c_char_p()
        return "" if function(code, byref(found)) else (found.value or b"").decode(errors="replace")

    return text


@cache
def driver_for(api: Api) -> Driver:
    """The library that torch uses: another copy of it would know none of torch's streams and tensors."""
    return Driver(api, open_library(api.stem, api.versions))


def open_library(stem: str, versions: tuple[str, ...]) -> ctypes.CDLL:
    """The copy that this process uses already, else torch's, else the system's, else ROCm's own folder's."""
    for path in _places(stem, versions):
        with suppress(OSError):
            return ctypes.CDLL(path)
    raise NoDriver(f"There is no {stem}.so here, which loads kernels into the GPU.", hint="Type: rocm-sd info")


def _places(stem: str, versions: tuple[str, ...]) -> Iterator[str]:
    if _MAPS.exists():
        # A wheel may write a digest into the name.
        mapped = re.compile(rf"\s(/\S*/{re.escape(stem)}(?:-[0-9a-f]+)?\.so[.\d]*)$", re.MULTILINE)
        yield from dict.fromkeys(mapped.findall(_MAPS.read_text()))
    for folder in torch_folders():
        yield from (str(path) for path in sorted(folder.glob(f"{stem}.so*"), reverse=True))
    yield from (f"{stem}.so{version}" for version in versions)
    rocm = settings.current().rocm_path or Path("/opt/rocm")
    yield from (str(path) for path in sorted((rocm / "lib").glob(f"{stem}.so*")))


def torch_folders() -> list[Path]:
    """Where wheels keep libraries: torch's own folder, and those of NVIDIA's and AMD's packages beside it."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return []
    torch = Path(spec.origin).parent
    of_vendors = (torch.parent / "nvidia").glob("*/lib")
    return [torch / "lib", *sorted(of_vendors), torch.parent / "_rocm_sdk_core" / "lib"]
