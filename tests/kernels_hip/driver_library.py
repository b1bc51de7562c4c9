"""The driver of driver_library.c from Python: what it was called with, and how it is to fail."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("driver_library.c")
CC = next((path for name in ("gcc", "cc", "clang-19", "clang") if (path := shutil.which(name))), None)


class _Call(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 32),
        ("values", ctypes.c_uint64 * 12),
        ("text", ctypes.c_char * 64),
        ("parameters", ctypes.c_ubyte * 128),
    )


@dataclass(frozen=True)
class Call:
    name: str
    values: tuple[int, ...]
    text: str
    parameters: bytes


def build(folder: Path, name: str, *options: str) -> Path:
    if CC is None:
        pytest.skip("no C compiler to build a driver with: apt-get install gcc")
    file = folder / name
    subprocess.run([CC, "-O1", "-shared", "-fPIC", *options, str(SOURCE), "-o", str(file)], check=True)
    return file


class DriverLibrary:
    def __init__(self, file: Path) -> None:
        self.file = file
        self.library = ctypes.CDLL(str(file))
        self.library.fake_call.restype = ctypes.POINTER(_Call)
        self.library.fake_source.restype = self.library.fake_options.restype = ctypes.c_char_p
        self.library.fake_code.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
        self.library.fake_reset()

    def fail(self, name: str, code: int) -> None:
        self.library.fake_fail(name.encode(), code)

    def expect(self, *sizes: int) -> None:
        """The bytes of each parameter of the kernels that will be launched."""
        self.library.fake_parameters((ctypes.c_int * len(sizes))(*sizes), len(sizes))

    def answer_code(self, code: bytes) -> None:
        self._code = code
        self.library.fake_code(code, len(code))

    def calls(self, *names: str) -> list[Call]:
        found = (self.library.fake_call(index).contents for index in range(self.library.fake_count()))
        all_ = [Call(c.name.decode(), tuple(c.values), c.text.decode("latin-1"), bytes(c.parameters)) for c in found]
        return [call for call in all_ if not names or call.name in names]

    @property
    def source(self) -> str:
        return self.library.fake_source().decode()

    @property
    def options(self) -> list[str]:
        return self.library.fake_options().decode().split()


class HostCard:
    """A `Card` whose memory is the host's, with a stream of any handle."""

    index = -1

    def __init__(self, stream: int = 0x5EED) -> None:
        self.handle, self.capturing, self.entered = stream, False, 0

    def stream(self) -> int:
        return self.handle

    def is_capturing(self) -> bool:
        return self.capturing

    @contextmanager
    def current(self):
        self.entered += 1
        yield
