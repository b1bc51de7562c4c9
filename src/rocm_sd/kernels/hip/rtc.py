"""compile_source of `toolchain` where there is no clang: by the compiler in a library, hiprtc or nvrtc.

Both have the same functions under two names, and take one text: the headers are written into it, since not every
version finds files. What was compiled once is kept as the toolchain keeps it.
"""

from __future__ import annotations

import base64
import ctypes
import re
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from rocm_sd import arch as archs
from rocm_sd.kernels import code_cache
from rocm_sd.kernels.hip import toolchain
from rocm_sd.kernels.hip.driver import NoDriver, open_library

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rocm_sd.arch import Arch

__all__ = ["HIPRTC", "NVRTC", "Rtc", "RtcApi", "api_for", "compile_source", "flattened", "rtc_for"]

_INCLUDE = re.compile(r'^[ \t]*#include\s*[<"](?:rocm_sd/)?(?P<name>\w+\.hpp)[>"].*$', re.MULTILINE)
_ONCE = re.compile(r"^#pragma once$", re.MULTILINE)


@dataclass(frozen=True)
class RtcApi:
    """`prefix` begins every function's name; `code` names what it makes; `options` come before the parameters."""

    prefix: str
    stem: str
    versions: tuple[str, ...]
    code: str
    arch_option: str
    options: tuple[str, ...]


HIPRTC = RtcApi("hiprtc", "libhiprtc", ("", ".7", ".6", ".5"), "Code", "--offload-arch={arch}", ("-O3", "-std=c++17"))
NVRTC = RtcApi("nvrtc", "libnvrtc", (".13", ".12", ""), "PTX", "--gpu-architecture=compute_{number}", ("-std=c++17",))


class Rtc:
    """One such library."""

    def __init__(self, api: RtcApi, library: ctypes.CDLL) -> None:
        self.api, self._library = api, library
        self._text = self._typed("GetErrorString", c_int)
        self._text.restype = c_char_p
        texts = POINTER(c_char_p)
        self._create = self._typed("CreateProgram", POINTER(c_void_p), c_char_p, c_char_p, c_int, texts, texts)
        self._compile = self._typed("CompileProgram", c_void_p, c_int, texts)
        self._destroy = self._typed("DestroyProgram", POINTER(c_void_p))
        self._version = self._typed("Version", POINTER(c_int), POINTER(c_int))

    def _typed(self, name: str, *arguments: Any) -> Any:
        function = getattr(self._library, self.api.prefix + name)
        function.argtypes, function.restype = arguments, c_int
        return function

    @property
    def version(self) -> str:
        major, minor = c_int(), c_int()
        self._version(byref(major), byref(minor))
        return f"{self.api.prefix} {major.value}.{minor.value}"

    def compile(self, text: str, name: str, arch: str, options: list[str]) -> bytes:
        """Machine code, or PTX text without the zero at its end."""
        program = c_void_p()
        self._checked(self._create(byref(program), text.encode(), name.encode(), 0, None, None), name, arch)
        try:
            given = (c_char_p * len(options))(*(option.encode() for option in options))
            code = self._compile(program, len(options), given)
            if code:
                lines = self._bytes("ProgramLog", program).decode(errors="replace").splitlines()
                first = next((line for line in lines if "error" in line), None)
                raise toolchain.HipCompilationFailed(
                    f"{self.api.prefix} refused {name} for {arch}: {(first or self._error_text(code)).strip(' .')}."
                )
            found = self._bytes(self.api.code, program)
            return found.rstrip(b"\0") if self.api.code == "PTX" else found
        finally:
            self._destroy(byref(program))

    def _bytes(self, what: str, program: c_void_p) -> bytes:
        size = c_size_t()
        self._checked(self._typed(f"Get{what}Size", c_void_p, POINTER(c_size_t))(program, byref(size)), what, "")
        buffer = ctypes.create_string_buffer(size.value)
        self._checked(self._typed(f"Get{what}", c_void_p, c_char_p)(program, buffer), what, "")
        return buffer.raw

    def _checked(self, code: int, name: str, arch: str) -> None:
        if code:
            where = f"{name} for {arch}" if arch else name
            raise toolchain.HipCompilationFailed(f"{self.api.prefix} failed on {where}: {self._error_text(code)}.")

    def _error_text(self, code: int) -> str:
        return f"{(self._text(code) or b'').decode(errors='replace')} ({code})"


@cache
def rtc_for(api: RtcApi) -> Rtc:
    """Raises `NoDriver` where there is none."""
    library = open_library(api.stem, api.versions)
    try:
        return Rtc(api, library)
    except AttributeError as error:
        raise NoDriver(f"The library {library._name} is no {api.prefix}: {error}.") from None  # noqa: SLF001


def compile_source(rtc: Rtc, source: str | Path, arch: Arch, parameters: Mapping[str, int | str]) -> bytes:
    """The image of every kernel of a source for one architecture."""
    file = toolchain.SOURCES / f"{source}.hip" if isinstance(source, str) else source
    number = arch.name.removeprefix("sm_")
    options = [rtc.api.arch_option.format(arch=arch.name, number=number), *rtc.api.options]
    options += toolchain._definitions(parameters)  # noqa: SLF001 -- of this package
    text = flattened(file)

    def compiled() -> dict[str, str]:
        image = rtc.compile(text, file.name, arch.name, options)
        return {"elf": base64.b64encode(image).decode(), "assembly": ""}

    entry = code_cache.entry((rtc.version, *options, text), inside="hip")
    return base64.b64decode(code_cache.kept(entry, compiled)["elf"])


def flattened(file: Path) -> str:
    """The source with our headers in place of their includes, each once."""
    seen: set[str] = set()

    def included(match: re.Match[str]) -> str:
        name = match["name"]
        header = toolchain.INCLUDE / "rocm_sd" / name
        if name in seen or not header.is_file():
            return "" if name in seen else match[0]
        seen.add(name)
        return _INCLUDE.sub(included, _ONCE.sub("", header.read_text(encoding="utf-8")))

    return _INCLUDE.sub(included, file.read_text(encoding="utf-8"))


def api_for(arch: Arch) -> RtcApi:
    return NVRTC if arch.vendor is archs.Vendor.NVIDIA else HIPRTC
