"""A compiled kernel as one value, read from its ELF: machine code, registers, LDS, arguments, and the entry state.

The layout of the file, of the metadata note and of the kernel descriptor is that of the LLVM user guide for the AMDGPU
backend (code object version 5).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

from rocm_sd import arch
from rocm_sd.errors import InvalidCodeObject

__all__ = ["CodeObject", "EntryState", "KernelArgument"]

_EM_AMDGPU = 224
_NOTE_AMDGPU_METADATA = 32
_SHT_SYMTAB, _SHT_NOBITS, _SHT_NOTE, _SHT_DYNSYM = 2, 8, 7, 11
_DESCRIPTOR_BYTES = 64
_POINTERS = frozenset({"global_buffer", "dynamic_shared_pointer"})


@dataclass(frozen=True, slots=True)
class KernelArgument:
    """One argument as it lies in the kernarg segment; Triton gives no names."""

    name: str | None
    offset: int
    size: int
    kind: str

    @property
    def is_pointer(self) -> bool:
        return self.kind in _POINTERS

    @property
    def is_hidden(self) -> bool:
        """Filled in by the runtime, not by the caller."""
        return self.kind.startswith("hidden_")


@dataclass(frozen=True, slots=True)
class EntryState:
    """What the hardware puts where before the first instruction, by the kernel descriptor."""

    user_sgprs: int
    private_segment_buffer: bool
    dispatch_ptr: bool
    queue_ptr: bool
    kernarg_segment_ptr: bool
    dispatch_id: bool
    flat_scratch_init: bool
    private_segment_size: bool
    workgroup_id: tuple[bool, bool, bool]
    workgroup_info: bool
    workitem_id_dimensions: int
    kernarg_preload_length: int
    kernarg_preload_offset: int
    float_mode: int
    ieee_mode: bool
    dx10_clamp: bool


@dataclass(frozen=True, slots=True)
class CodeObject:
    """One kernel. `entry_offset` counts from the start of `text`; `workgroup_size` is the largest flat size."""

    arch: arch.Arch
    name: str
    elf: bytes = field(repr=False)
    assembly: str = field(repr=False)
    text: bytes = field(repr=False)
    text_address: int
    entry_offset: int
    vgprs: int
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    scratch: int
    lds: int
    wave_size: int
    workgroup_size: int
    arguments: tuple[KernelArgument, ...]
    kernarg_size: int
    entry: EntryState

    @classmethod
    def from_elf(cls, elf: bytes, assembly: str = "", name: str | None = None) -> CodeObject:
        """Read the kernel `name`, or the only one there is."""
        try:
            return cls._read(elf, assembly, name)
        except (struct.error, IndexError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise InvalidCodeObject(f"it is damaged ({error})") from error

    @classmethod
    def _read(cls, elf: bytes, assembly: str, name: str | None) -> CodeObject:
        sections = _Sections(elf)
        metadata = sections.metadata()
        target = _text(metadata, "amdhsa.target").rsplit("-", 1)[-1]
        gpu = arch.get(target)
        if not gpu.known:
            known = ", ".join(sorted(n for n, a in arch.ARCHS.items() if a.vendor is arch.Vendor.AMD))
            raise InvalidCodeObject(f"it was compiled for {target!r}, which is not known", hint=f"Known: {known}.")
        kernel = _choose(metadata.get("amdhsa.kernels"), name)
        symbol = _text(kernel, ".symbol")
        place, descriptor = sections.symbol(symbol, _DESCRIPTOR_BYTES)
        entry_offset, rsrc1, rsrc2, properties, preload = _descriptor(descriptor)
        text_address, text = sections.section(".text")
        entry = place + entry_offset - text_address
        if not 0 <= entry < len(text):
            raise InvalidCodeObject(f"the kernel {symbol!r} begins outside of the machine code")
        return cls(
            arch=gpu,
            name=_text(kernel, ".name"),
            elf=elf,
            assembly=assembly,
            text=text,
            text_address=text_address,
            entry_offset=entry,
            vgprs=_number(kernel, ".vgpr_count"),
            agprs=_number(kernel, ".agpr_count", 0),
            sgprs=_number(kernel, ".sgpr_count"),
            vgpr_spills=_number(kernel, ".vgpr_spill_count", 0),
            sgpr_spills=_number(kernel, ".sgpr_spill_count", 0),
            scratch=_number(kernel, ".private_segment_fixed_size"),
            lds=_number(kernel, ".group_segment_fixed_size"),
            wave_size=_number(kernel, ".wavefront_size"),
            workgroup_size=_number(kernel, ".max_flat_workgroup_size"),
            arguments=tuple(_argument(entry) for entry in kernel.get(".args", [])),
            kernarg_size=_number(kernel, ".kernarg_segment_size"),
            entry=_entry_state(rsrc1, rsrc2, properties, preload),
        )


def _descriptor(raw: bytes) -> tuple[int, int, int, int, int]:
    (entry_offset,) = struct.unpack_from("<q", raw, 16)
    rsrc1, rsrc2, properties, preload = struct.unpack_from("<IIHH", raw, 48)
    return entry_offset, rsrc1, rsrc2, properties, preload


def _entry_state(rsrc1: int, rsrc2: int, properties: int, preload: int) -> EntryState:
    def has(word: int, bit: int) -> bool:
        return bool(word >> bit & 1)

    return EntryState(
        user_sgprs=rsrc2 >> 1 & 31,
        private_segment_buffer=has(properties, 0),
        dispatch_ptr=has(properties, 1),
        queue_ptr=has(properties, 2),
        kernarg_segment_ptr=has(properties, 3),
        dispatch_id=has(properties, 4),
        flat_scratch_init=has(properties, 5),
        private_segment_size=has(properties, 6),
        workgroup_id=(has(rsrc2, 7), has(rsrc2, 8), has(rsrc2, 9)),
        workgroup_info=has(rsrc2, 10),
        workitem_id_dimensions=1 + (rsrc2 >> 11 & 3),
        kernarg_preload_length=preload & 0x7F,
        kernarg_preload_offset=preload >> 7 & 0x1FF,
        float_mode=rsrc1 >> 12 & 0xFF,
        ieee_mode=has(rsrc1, 23),
        dx10_clamp=has(rsrc1, 21),
    )


def _argument(entry: dict[str, Any]) -> KernelArgument:
    return KernelArgument(
        name=entry.get(".name"),
        offset=_number(entry, ".offset"),
        size=_number(entry, ".size"),
        kind=_text(entry, ".value_kind"),
    )


def _choose(kernels: Any, name: str | None) -> dict[str, Any]:
    if not isinstance(kernels, list) or not kernels:
        raise InvalidCodeObject("its metadata names no kernel")
    names = [_text(kernel, ".name") for kernel in kernels]
    if name is None and len(kernels) > 1:
        raise InvalidCodeObject("it holds more than one kernel", hint=f"Name one of: {', '.join(names)}.")
    if name is not None and name not in names:
        raise InvalidCodeObject(f"it holds no kernel {name!r}", hint=f"Name one of: {', '.join(names)}.")
    chosen: dict[str, Any] = kernels[0 if name is None else names.index(name)]
    return chosen


def _number(mapping: dict[str, Any], key: str, default: int | None = None) -> int:
    value = mapping.get(key, default)
    if not isinstance(value, int):
        raise InvalidCodeObject(f"its metadata gives no {key}")
    return value


def _text(mapping: Any, key: str) -> str:
    value = mapping.get(key) if isinstance(mapping, dict) else None
    if not isinstance(value, str):
        raise InvalidCodeObject(f"its metadata gives no {key}")
    return value


class _Sections:
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
