"""The parts of a code object's file that a loader and the proof ladder read: sections, symbols and metadata.

The layout of the file and of the metadata note is that of the LLVM user guide for the AMDGPU backend (code object
version 5).
"""

from __future__ import annotations

import struct
from typing import Any

from rocm_sd.errors import InvalidCodeObject

__all__ = ["Sections"]

_EM_AMDGPU = 224
_NOTE_AMDGPU_METADATA = 32
_SHT_SYMTAB, _SHT_NOBITS, _SHT_NOTE, _SHT_DYNSYM = 2, 8, 7, 11


class Sections:
    """The parts of an ELF file that a loader needs; every read is checked against the length of the file."""

    def __init__(self, elf: bytes) -> None:
        self.elf = elf
        if elf[:4] != b"\x7fELF":
            raise InvalidCodeObject("it does not begin as an ELF file does")
        header = self._take(0, 64, "the ELF header")
        if header[4] != 2 or header[5] != 1:
            raise InvalidCodeObject("it is not a 64-bit little-endian ELF file")
        machine, table, size, count, names = (
            struct.unpack_from("<H", header, 18)[0],
            struct.unpack_from("<Q", header, 40)[0],
            *struct.unpack_from("<HHH", header, 58),
        )
        if machine != _EM_AMDGPU:
            raise InvalidCodeObject(f"it is for machine {machine}, not for an AMD GPU ({_EM_AMDGPU})")
        if size != 64 or names >= count:
            raise InvalidCodeObject("its table of sections is damaged")
        raw = self._take(table, size * count, "the table of sections")
        self.headers = [struct.unpack_from("<IIQQQQIIQQ", raw, size * index) for index in range(count)]
        self.names = [self._string(names, header[0]) for header in self.headers]

    def _take(self, offset: int, size: int, what: str) -> bytes:
        if offset + size > len(self.elf):
            raise InvalidCodeObject(f"it ends at byte {len(self.elf)}, within {what}")
        return self.elf[offset : offset + size]

    def _content(self, index: int) -> bytes:
        _, kind, _, _, offset, size, *_ = self.headers[index]
        what = f"section {self.names[index]!r}" if hasattr(self, "names") else "the names of sections"
        return b"" if kind == _SHT_NOBITS else self._take(offset, size, what)

    def _string(self, section: int, offset: int) -> str:
        content = self._content(section)
        return content[offset : max(content.find(b"\0", offset), offset)].decode("utf-8", "replace")

    def section(self, name: str) -> tuple[int, bytes]:
        """Its address and its content."""
        if name not in self.names:
            raise InvalidCodeObject(f"it has no section {name}")
        index = self.names.index(name)
        return self.headers[index][3], self._content(index)

    def symbol(self, name: str, size: int) -> tuple[int, bytes]:
        """The address of a symbol and `size` bytes from there."""
        for index, (_, kind, _, _, _, _, link, _, _, _) in enumerate(self.headers):
            if kind not in (_SHT_SYMTAB, _SHT_DYNSYM):
                continue
            for label, _, _, section, value, _ in struct.iter_unpack("<IBBHQQ", self._content(index)):
                if self._string(link, label) == name and section < len(self.headers):
                    start = value - self.headers[section][3]
                    content = self._content(section)[start : start + size]
                    if len(content) < size:
                        raise InvalidCodeObject(f"the symbol {name!r} points outside of its section")
                    return value, content
        raise InvalidCodeObject(f"it defines no symbol {name!r}")

    def metadata(self) -> dict[str, Any]:
        for index, header in enumerate(self.headers):
            if header[1] != _SHT_NOTE:
                continue
            content, place = self._content(index), 0
            while place + 12 <= len(content):
                name_size, size, kind = struct.unpack_from("<III", content, place)
                body = place + 12 + (name_size + 3 & ~3)
                if kind == _NOTE_AMDGPU_METADATA and content[place + 12 : place + 18] == b"AMDGPU":
                    value = _MessagePack(content[body : body + size]).value()
                    if isinstance(value, dict):
                        return value
                place = body + (size + 3 & ~3)
        raise InvalidCodeObject("it carries no AMDGPU metadata")


class _MessagePack:
    """A reader of MessagePack, as far as code-object metadata uses it."""

    _SIZES = {  # noqa: RUF012 - a constant of the format
        0xC4: "B", 0xC5: ">H", 0xC6: ">I", 0xCA: ">f", 0xCB: ">d", 0xCC: "B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q",
        0xD0: "b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q", 0xD9: "B", 0xDA: ">H", 0xDB: ">I", 0xDC: ">H", 0xDD: ">I",
        0xDE: ">H", 0xDF: ">I",
    }  # fmt: skip

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.place = 0

    def _take(self, size: int) -> bytes:
        taken = self.raw[self.place : self.place + size]
        if len(taken) < size:
            raise InvalidCodeObject("its metadata is cut short")
        self.place += size
        return taken

    def _items(self, count: int) -> list[Any]:
        return [self.value() for _ in range(count)]

    def _map(self, count: int) -> dict[Any, Any]:
        return {self.value(): self.value() for _ in range(count)}

    def value(self) -> Any:  # noqa: C901, PLR0911 - one return for each kind of the format
        code = self._take(1)[0]
        if code < 0x80:
            return code
        if code < 0x90:
            return self._map(code & 15)
        if code < 0xA0:
            return self._items(code & 15)
        if code < 0xC0:
            return self._take(code & 31).decode()
        if code >= 0xE0:
            return code - 256
        if code in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[code]
        form = self._SIZES.get(code)
        if form is None:
            raise InvalidCodeObject(f"its metadata uses the unknown code {code:#x}")
        number = struct.unpack(form, self._take(struct.calcsize(form)))[0]
        if code in (0xC4, 0xC5, 0xC6):
            return self._take(number)
        if code in (0xD9, 0xDA, 0xDB):
            return self._take(number).decode()
        if code in (0xDC, 0xDD):
            return self._items(number)
        if code in (0xDE, 0xDF):
            return self._map(number)
        return number
