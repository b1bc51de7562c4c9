"""compile_source("layout_copy", "gfx1100", {"element": "bits16"}) -> machine code, with or without ROCm and a GPU.

The sources need a compiler's builtins and no header but ours, so any clang that knows the architecture will do. What
was compiled once is kept under the cache folder, by content: the source and every header, the architecture, the
parameters, the options, and the compiler's version. ROCM_SD_CACHE names another folder.

The same sources, but those on a matrix unit, compile for NVIDIA as well (nvidia.hpp), to prove their logic on a card.
"""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocm_sd import arch as archs
from rocm_sd import settings
from rocm_sd.errors import InvalidOption, Unsupported
from rocm_sd.kernels import code_cache
from rocm_sd.kernels.hip.launch import HipUnavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.arch import Arch

__all__ = [
    "INCLUDE",
    "NVIDIA_TARGETS",
    "SOURCES",
    "TARGETS",
    "Compiled",
    "Compiler",
    "HipCompilationFailed",
    "NoHipCompiler",
    "compile_source",
    "find_compiler",
    "source_names",
]

INCLUDE = Path(__file__).parent / "include"
SOURCES = Path(__file__).parent / "sources"
# One or two of each family; arch.hpp has the tags. Others of the same families compile too, and are not proven.
TARGETS = ("gfx1030", "gfx90a", "gfx942", "gfx1100", "gfx1200", "gfx1201")
# bfloat16 begins with sm_80; the oldest compiler allowed knows none beyond sm_90.
NVIDIA_TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90")
# Debian's by version, then any other; ROCm's own is looked for last.
CLANGS = ("clang-19", "clang-20", "clang-21", "clang")
OPTIONS = (
    "-x", "hip", "--offload-device-only", "--no-gpu-bundle-output", "-nogpulib", "-nogpuinc", "-O3", "-std=c++17",
    # Else a symbol is named after the paths of the files, and the same source gives other bytes in another folder.
    "-fuse-cuid=none",
)  # fmt: skip
NVIDIA_OPTIONS = (
    "-x", "cuda", "--offload-device-only", "-nogpulib", "-nogpuinc", "-O3", "-std=c++17", "-fuse-cuid=none",
    # The oldest PTX with all of sm_90, whatever CUDA is installed: any driver since 12.0 loads it.
    "--cuda-feature=+ptx80", "-Wno-unknown-cuda-version",
)  # fmt: skip
OLDEST = 19  # fences for LDS alone are not in older ones
TIMEOUT_S = 180.0

_PARAMETER = re.compile(r"[a-z][a-z0-9_]*")
_VALUE = re.compile(r"-?[0-9]+|[a-z][a-z0-9_]*")
_VERSION = re.compile(r"clang version (?P<major>\d+)")


class NoHipCompiler(HipUnavailable):
    """There is nothing here to compile HIP with: other implementations go on without it."""


class HipCompilationFailed(HipUnavailable):
    """The compiler refused a source, crashed, or did not end."""


@dataclass(frozen=True)
class Compiler:
    """A clang that knows AMD targets; `version` is all that it says of itself."""

    path: str
    version: str


@dataclass(frozen=True)
class Compiled:
    """One source for one architecture: the code object (an ELF file) and its text; for NVIDIA both are PTX."""

    arch: str
    elf: bytes = field(repr=False)
    assembly: str = field(repr=False)


def source_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in SOURCES.glob("*.hip")))


def find_compiler() -> Compiler:
    """The first that is there and new enough; raises `NoHipCompiler` with what to type."""
    rocm = (settings.current().rocm_path or Path("/opt/rocm")) / "llvm" / "bin" / "clang"
    paths = [path for name in CLANGS if (path := shutil.which(name))] + ([str(rocm)] if rocm.is_file() else [])
    for path in paths:
        version = _version(path)
        match = _VERSION.search(version)
        if match and int(match["major"]) >= OLDEST:
            return Compiler(path, version)
    found = f"found only older ones: {', '.join(paths)}" if paths else f"looked for {', '.join(CLANGS)} and {rocm}"
    raise NoHipCompiler(
        f"There is no clang {OLDEST} or newer to compile HIP with: {found}.",
        hint="Type: apt-get install clang-19 lld-19",
    )


@lru_cache
def _version(path: str) -> str:
    return subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout


def compile_source(source: str | Path, arch: Arch | str, parameters: Mapping[str, int | str]) -> Compiled:
    """Every kernel of `sources/<source>.hip`, or of a file of yours, for one architecture.

    The parameter `element` is the macro ROCM_SD_ELEMENT there.
    """
    file = source if isinstance(source, Path) else SOURCES / f"{source}.hip"
    if not file.is_file():
        raise InvalidOption("HIP source", source, list(source_names()))
    name = archs.get(arch).name if isinstance(arch, str) else arch.name
    amd = archs.get(name).known and archs.get(name).vendor is archs.Vendor.AMD
    if not amd and name not in NVIDIA_TARGETS:
        proven = ", ".join((*TARGETS, *NVIDIA_TARGETS))
        raise Unsupported("HIP", f"the architecture {name}", hint=f"Proven: {proven}.")
    options = (*(OPTIONS if amd else NVIDIA_OPTIONS), f"--offload-arch={name}", *_definitions(parameters))
    compiler = find_compiler()
    sources = (part for path in (file, *sorted(INCLUDE.rglob("*.hpp"))) for part in (path.name, path.read_bytes()))
    entry = code_cache.entry((compiler.version, *options, *sources), inside="hip")
    body = code_cache.kept(entry, lambda: _compile(compiler, file, name, options))
    return Compiled(name, base64.b64decode(body["elf"]), body["assembly"])


def _definitions(parameters: Mapping[str, int | str]) -> list[str]:
    found = []
    for name, value in sorted(parameters.items()):
        plain = str(int(value)) if isinstance(value, int) else value
        if not _PARAMETER.fullmatch(name) or not _VALUE.fullmatch(plain):
            raise InvalidOption(
                "HIP parameter", f"{name}={plain}", ["a lower-case name with a number or a type's name"]
            )
        found.append(f"-DROCM_SD_{name.upper()}={plain}")
    return found


def _compile(compiler: Compiler, file: Path, arch: str, options: tuple[str, ...]) -> dict[str, Any]:
    """To assembly text, which the gates read, and from that very text to the code object; for NVIDIA, to PTX text."""
    with tempfile.TemporaryDirectory() as folder:
        text, linked = Path(folder) / "kernel.s", Path(folder) / "kernel.co"
        _run([compiler.path, *options, f"-I{INCLUDE}", "-S", str(file), "-o", str(text)], file.name, arch)
        if arch in NVIDIA_TARGETS:
            ptx = text.read_text(encoding="utf-8")
            return {"elf": base64.b64encode(ptx.encode()).decode(), "assembly": ptx}
        target = ["-x", "assembler", "-target", "amdgcn-amd-amdhsa", f"-mcpu={arch}"]
        _run([compiler.path, *target, str(text), "-o", str(linked)], file.name, arch)
        return {"elf": base64.b64encode(linked.read_bytes()).decode(), "assembly": text.read_text(encoding="utf-8")}


def _run(command: list[str], source: str, arch: str) -> None:
    program = Path(command[0]).name
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise HipCompilationFailed(f"{program} did not end within {TIMEOUT_S:.0f} s on {source} for {arch}.") from None
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip())
        hint = "Type: apt-get install lld-19" if "lld" in first else None
        raise HipCompilationFailed(f"{program} refused {source} for {arch}: {first}.", hint=hint)
