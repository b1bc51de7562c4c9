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
from rocm_sd.kernels.elf import Sections

__all__ = ["CodeObject", "EntryState", "KernelArgument"]

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
    kernarg_preload_length: int
    kernarg_preload_offset: int


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
        sections = Sections(elf)
        metadata = sections.metadata()
        target = _text(metadata, "amdhsa.target").rsplit("-", 1)[-1]
        gpu = arch.get(target)
        if not gpu.known:
            known = ", ".join(sorted(n for n, a in arch.ARCHS.items() if a.vendor is arch.Vendor.AMD))
            raise InvalidCodeObject(f"it was compiled for {target!r}, which is not known", hint=f"Known: {known}.")
        kernel = _choose(metadata.get("amdhsa.kernels"), name)
        symbol = _text(kernel, ".symbol")
        place, descriptor = sections.symbol(symbol, _DESCRIPTOR_BYTES)
        (entry_offset,) = struct.unpack_from("<q", descriptor, 16)
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
            entry=_entry_state(descriptor),
        )


_PROPERTIES = (
    "private_segment_buffer", "dispatch_ptr", "queue_ptr", "kernarg_segment_ptr", "dispatch_id", "flat_scratch_init",
    "private_segment_size",
)  # fmt: skip


def _entry_state(descriptor: bytes) -> EntryState:
    rsrc2, properties, preload = struct.unpack_from("<IHH", descriptor, 52)
    return EntryState(
        user_sgprs=rsrc2 >> 1 & 31,
        workgroup_id=(bool(rsrc2 >> 7 & 1), bool(rsrc2 >> 8 & 1), bool(rsrc2 >> 9 & 1)),
        kernarg_preload_length=preload & 0x7F,
        kernarg_preload_offset=preload >> 7 & 0x1FF,
        **{name: bool(properties >> bit & 1) for bit, name in enumerate(_PROPERTIES)},
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
