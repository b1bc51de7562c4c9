"""Scalar arithmetic, compares and scalar loads, on one value for each wave."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rocm_sd.verify.emulator.errors import UnknownInstruction
from rocm_sd.verify.emulator.operands import scalar_source, scalar_target, signed_field
from rocm_sd.verify.emulator.races import lanes_of
from rocm_sd.verify.emulator.scalar_tables import ALIASES, COMPARES, LOGIC, ONE_SOURCE, TWO_SOURCES, add_signed, fused
from rocm_sd.verify.emulator.wave import EXEC, Outstanding, sgpr_bits

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_sd.verify.emulator.decode import Decoded
    from rocm_sd.verify.emulator.machine import Machine
    from rocm_sd.verify.emulator.wave import Group

    Run = Callable[[Group], None]

__all__ = ["bind_scalar", "bind_scalar_load"]

_U = np.uint32

_READ_MODIFY = frozenset(
    {
        "s_cmov_b32", "s_cmov_b64", "s_bitset0_b32", "s_bitset1_b32", "s_fmac_f32", "s_fmaak_f32", "s_fmamk_f32",
    }
)  # fmt: skip


def bind_scalar(inst: Decoded) -> tuple[Run, int]:
    """What the instruction does to a group, and the registers it touches."""
    name = ALIASES.get(inst.name, inst.name)
    if name.endswith("_f16") and any(240 <= inst.fields.get(source, 0) <= 248 for source in ("ssrc0", "ssrc1")):
        raise UnknownInstruction(inst.name, inst.address, "a constant of 16 bits")
    if inst.form == "SOPK":
        return _bind_immediate(inst, name)
    if "saveexec" in name or "wrexec" in name:
        return _bind_save_exec(inst, name)
    if name in _READ_MODIFY:
        return _bind_read_modify(inst, name)
    if name in TWO_SOURCES:
        (first, second, result), compute = TWO_SOURCES[name]
        return _bind(inst, (first, second), result, compute)
    if name in ONE_SOURCE:
        source, result, convert = ONE_SOURCE[name]
        return _bind(inst, (source, None), result, lambda a, _b, _scc: convert(a))
    if name in COMPARES:
        first, second, test = COMPARES[name]
        return _bind(inst, (first, second), None, _comparing(test))
    raise UnknownInstruction(inst.name, inst.address)


def _bind(
    inst: Decoded, sources: tuple[int, int | None], result: int | None, function: Callable[[Any, Any, Any], Any]
) -> tuple[Run, int]:
    """`sources` and `result` are widths, None for one that the instruction does not have."""
    read, touched = scalar_source(inst, inst.get("ssrc0"), sources[0])
    second, more = scalar_source(inst, inst.get("ssrc1"), sources[1]) if sources[1] else (lambda _g: None, 0)
    write, filled = scalar_target(inst, inst.get("sdst"), result) if result else (_discard, 0)
    return _applied(function, read, second, write), touched | more | filled


def _nothing(_g: Group) -> None:
    """A mode that is one here already."""


def _discard(_g: Group, _value: Any) -> None:
    """The target of a compare."""


def _applied(
    function: Callable[[Any, Any, Any], Any],
    first: Callable[[Group], Any],
    second: Callable[[Group], Any],
    write: Callable[[Group, Any], None],
) -> Run:
    def run(g: Group) -> None:
        value, scc = function(first(g), second(g), g.scc)
        write(g, value)
        if scc is not None:
            g.scc[:] = scc

    return run


def _comparing(test: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    return lambda a, b, _scc: (None, test(a, b))


def _bind_save_exec(inst: Decoded, name: str) -> tuple[Run, int]:
    width = 64 if name.endswith("64") else 32
    word, _, kind = name.removeprefix("s_").rsplit("_", 1)[0].rpartition("_")
    function = LOGIC[word]
    read, touched = scalar_source(inst, inst.get("ssrc0"), width)
    save, saved = scalar_target(inst, inst.get("sdst"), width)
    read_exec, _ = scalar_source(inst, EXEC, width)
    write_exec, _ = scalar_target(inst, EXEC, width)

    def run(g: Group) -> None:
        before = read_exec(g).copy()
        after = function(read(g), before)
        save(g, before if kind == "saveexec" else after)
        write_exec(g, after)
        g.scc[:] = after != 0

    return run, touched | saved


def _bind_read_modify(inst: Decoded, name: str) -> tuple[Run, int]:
    """Instructions whose destination is a source too, or that carry a constant of their own."""
    width = 64 if name.endswith("64") else 32
    read, touched = scalar_source(inst, inst.get("ssrc0"), width)
    # 128 is the constant zero.
    second, more = scalar_source(inst, inst.fields.get("ssrc1", 128), width)
    old, _ = scalar_source(inst, inst.get("sdst"), width)
    write, filled = scalar_target(inst, inst.get("sdst"), width)
    given = np.array([inst.fields.get("literal", 0)], _U)

    def value(g: Group) -> Any:
        x, y = read(g), second(g)
        if name.startswith("s_cmov"):
            return np.where(g.scc, x, old(g))
        if name.startswith("s_bitset"):
            bit = _U(1) << (x & _U(31))
            return old(g) | bit if name == "s_bitset1_b32" else old(g) & ~bit
        return fused(*{"s_fmac_f32": (x, y, old(g)), "s_fmaak_f32": (x, y, given), "s_fmamk_f32": (x, given, y)}[name])

    return lambda g: write(g, value(g)), touched | more | filled


_IMMEDIATE: dict[str, Callable[[Any, Any, Any], Any]] = {
    "s_movk_i32": lambda _old, given, _scc: (given, None),
    "s_cmovk_i32": lambda old, given, scc: (np.where(scc, given, old), None),
    "s_addk_i32": lambda old, given, _scc: add_signed(old, given),
    "s_mulk_i32": lambda old, given, _scc: (old * given, None),
}


# Of the register MODE: field, bit and width of FP16_OVFL, and of how results in fp16 and fp64 are rounded.
_SATURATES = 1 | 23 << 6 | (1 - 1) << 11
_ROUNDS = 1 | 2 << 6 | (2 - 1) << 11
_TO_NEAREST = 0


def _bind_immediate(inst: Decoded, name: str) -> tuple[Run, int]:
    number = inst.get("simm16")
    if name == "s_setreg_imm32_b32":
        # Conversions to 8 bits saturate from then on, which they do here in any case. What becomes of results in fp16
        # that overflow is not modelled: a kernel that has any is told apart from its reference by them.
        # To the nearest, ties to even, is how all begin, and how all is rounded here.
        if (number, inst.get("literal")) not in {(_SATURATES, 1), (_ROUNDS, _TO_NEAREST)}:
            raise UnknownInstruction(inst.name, inst.address, "a mode that is not modelled")
        return _nothing, 0
    read, _ = scalar_source(inst, inst.get("sdst"), 32)
    write, touched = scalar_target(inst, inst.get("sdst"), 32)
    given = np.array([signed_field(number, 16) & 0xFFFFFFFF], _U)
    if name.startswith("s_cmpk_"):
        test = COMPARES[name.replace("cmpk", "cmp")][2]
        other = given if name.endswith("_i32") else np.array([number], _U)
        return _applied(_comparing(test), read, lambda _g: other, _discard), touched
    if name not in _IMMEDIATE:
        raise UnknownInstruction(inst.name, inst.address)
    return _applied(_IMMEDIATE[name], read, lambda _g: given, write), touched


_SIZES = {"b32": 1, "b64": 2, "b96": 3, "b128": 4, "b256": 8, "b512": 16, "dword": 1}
_SIZES |= {f"dwordx{n}": n for n in (2, 4, 8, 16)}
# From gfx12 on, one of these fills a register: bytes, and as what they are read.
_NARROW = {"u8": (1, np.uint8), "i8": (1, np.int8), "u16": (2, np.uint16), "i16": (2, np.int16)}


def bind_scalar_load(inst: Decoded, machine: Machine, counter: str) -> tuple[Run, int]:
    """s_load_*: dwords at a scalar address, or less than one. Buffer forms are not used by compilers for these
    kernels.
    """
    kind = inst.name.removeprefix("s_load_")
    element, read_as = _NARROW.get(kind, (4, np.uint32))
    size = 1 if kind in _NARROW else _SIZES.get(kind)
    if not inst.name.startswith("s_load_") or size is None:
        raise UnknownInstruction(inst.name, inst.address)
    target = inst.get("sdata")
    offset, register = _scalar_offset(inst)
    read_base, touched = scalar_source(inst, 2 * inst.get("sbase"), 64)
    # 128 is the constant zero.
    read_offset, more = scalar_source(inst, 128 if register is None else register, 32)
    filled = sgpr_bits(target, size)

    def run(g: Group) -> None:
        address = read_base(g) + np.uint64(offset & 0xFFFFFFFFFFFFFFFF) + read_offset(g)
        address = np.broadcast_to(address & ~np.uint64(element - 1), (g.width,))
        memory = machine.memory
        found = memory.load(np.ascontiguousarray(address), element, size, inst.address, lanes_of(g, scalar=True))
        g.s[target : target + size] = found if element == 4 else found.view(read_as).astype(np.int64) & 0xFFFFFFFF
        g.issue(counter, Outstanding(inst.name, inst.address, filled, in_order=False))

    return run, touched | more | filled


def _scalar_offset(inst: Decoded) -> tuple[int, int | None]:
    """The constant and the register that are added to the base."""
    if inst.family == "gfx94x":
        register = inst.get("soffset") if inst.get("soffset_en") else None
        if not inst.get("imm"):
            return 0, inst.get("offset") & 0x7F if register is None else register
        return signed_field(inst.get("offset"), 21), register
    code = inst.get("soffset")
    constant = signed_field(inst.get("ioffset"), 24) if inst.family == "gfx12" else signed_field(inst.get("offset"), 21)
    return constant, None if code == inst.null else code
