"""Scalar arithmetic, compares and scalar loads, on one value for each wave."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rocm_sd.verify.emulator.errors import UnknownInstruction
from rocm_sd.verify.emulator.operands import null_code, scalar_bits, scalar_reader, scalar_writer
from rocm_sd.verify.emulator.scalar_tables import ALIASES, COMPARES, ONE_SOURCE, TWO_SOURCES, add_signed, fused
from rocm_sd.verify.emulator.wave import EXEC, Outstanding, sgpr_bits

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_sd.verify.emulator.decode import Decoded
    from rocm_sd.verify.emulator.memory import Memory
    from rocm_sd.verify.emulator.wave import Group

    Run = Callable[[Group], None]

__all__ = ["bind_scalar", "bind_scalar_load"]

_U = np.uint32

_SAVE_EXEC: dict[str, Callable[[Any, Any], Any]] = {
    "and": lambda a, e: a & e,
    "or": lambda a, e: a | e,
    "xor": lambda a, e: a ^ e,
    "nand": lambda a, e: ~(a & e),
    "nor": lambda a, e: ~(a | e),
    "xnor": lambda a, e: ~(a ^ e),
    "and_not0": lambda a, e: ~a & e,
    "or_not0": lambda a, e: ~a | e,
    "and_not1": lambda a, e: a & ~e,
    "or_not1": lambda a, e: a | ~e,
}


def bind_scalar(inst: Decoded, family: str) -> tuple[Run, int]:
    """What the instruction does to a group, and the registers it touches."""
    name = ALIASES.get(inst.name, inst.name)
    if inst.form == "SOPK":
        return _bind_immediate(inst, name, family)
    if "saveexec" in name or "wrexec" in name:
        return _bind_save_exec(inst, name, family)
    if name in TWO_SOURCES:
        first, second, result, function = TWO_SOURCES[name]
        return _bind_two(inst, family, (first, second, result), function)
    if name in ONE_SOURCE:
        return _bind_one(inst, family, *ONE_SOURCE[name])
    if name in COMPARES:
        return _bind_compare(inst, family, *COMPARES[name])
    if name in (
        "s_cmov_b32",
        "s_cmov_b64",
        "s_bitset0_b32",
        "s_bitset1_b32",
        "s_fmac_f32",
        "s_fmaak_f32",
        "s_fmamk_f32",
    ):
        return _bind_read_modify(inst, name, family)
    raise UnknownInstruction(inst.name, inst.address)


def _bind_two(
    inst: Decoded, family: str, widths: tuple[int, int, int], function: Callable[[Any, Any, Any], Any]
) -> tuple[Run, int]:
    first, second, result = widths
    a, b, d = inst.get("ssrc0"), inst.get("ssrc1"), inst.get("sdst")
    read_a, read_b = scalar_reader(a, first, inst, family), scalar_reader(b, second, inst, family)
    write = scalar_writer(d, result, inst, family)

    def run(g: Group) -> None:
        value, scc = function(read_a(g), read_b(g), g.scc)
        write(g, value)
        if scc is not None:
            g.scc[:] = scc

    touched = scalar_bits(a, first, family) | scalar_bits(b, second, family) | scalar_bits(d, result, family)
    return run, touched


def _bind_one(inst: Decoded, family: str, source: int, result: int, function: Callable[[Any], Any]) -> tuple[Run, int]:
    a, d = inst.get("ssrc0"), inst.get("sdst")
    read, write = scalar_reader(a, source, inst, family), scalar_writer(d, result, inst, family)

    def run(g: Group) -> None:
        value, scc = function(read(g))
        write(g, value)
        if scc is not None:
            g.scc[:] = scc

    return run, scalar_bits(a, source, family) | scalar_bits(d, result, family)


def _bind_compare(
    inst: Decoded, family: str, first: int, second: int, function: Callable[[Any, Any], Any]
) -> tuple[Run, int]:
    a, b = inst.get("ssrc0"), inst.get("ssrc1")
    read_a, read_b = scalar_reader(a, first, inst, family), scalar_reader(b, second, inst, family)

    def run(g: Group) -> None:
        g.scc[:] = function(read_a(g), read_b(g))

    return run, scalar_bits(a, first, family) | scalar_bits(b, second, family)


def _bind_save_exec(inst: Decoded, name: str, family: str) -> tuple[Run, int]:
    width = 64 if name.endswith("64") else 32
    word, _, kind = name.removeprefix("s_").rsplit("_", 1)[0].rpartition("_")
    function = _SAVE_EXEC[word]
    a, d = inst.get("ssrc0"), inst.get("sdst")
    read, save = scalar_reader(a, width, inst, family), scalar_writer(d, width, inst, family)
    read_exec, write_exec = scalar_reader(EXEC, width, inst, family), scalar_writer(EXEC, width, inst, family)

    def run(g: Group) -> None:
        before = read_exec(g).copy()
        after = function(read(g), before)
        save(g, before if kind == "saveexec" else after)
        write_exec(g, after)
        g.scc[:] = after != 0

    return run, scalar_bits(a, width, family) | scalar_bits(d, width, family)


def _bind_read_modify(inst: Decoded, name: str, family: str) -> tuple[Run, int]:
    """Instructions whose destination is a source too, or that carry a constant of their own."""
    width = 64 if name.endswith("64") else 32
    a, d = inst.get("ssrc0"), inst.get("sdst")
    read, old = scalar_reader(a, width, inst, family), scalar_reader(d, width, inst, family)
    second = scalar_reader(inst.get("ssrc1"), width, inst, family) if "ssrc1" in inst.fields else None
    write = scalar_writer(d, width, inst, family)
    given = np.array([inst.fields.get("literal", 0)], _U)

    def value(g: Group) -> Any:
        x = read(g)
        if name.startswith("s_cmov"):
            return np.where(g.scc, x, old(g))
        if name.startswith("s_bitset"):
            bit = _U(1) << (x & _U(31))
            return old(g) | bit if name == "s_bitset1_b32" else old(g) & ~bit
        assert second is not None
        y = second(g)
        return {"s_fmac_f32": (x, y, old(g)), "s_fmaak_f32": (x, y, given), "s_fmamk_f32": (x, given, y)}[name]

    def run(g: Group) -> None:
        found = value(g)
        write(g, fused(*found) if isinstance(found, tuple) else found)

    touched = scalar_bits(a, width, family) | scalar_bits(d, width, family)
    return run, touched | scalar_bits(inst.fields.get("ssrc1", 128), width, family)


def _bind_immediate(inst: Decoded, name: str, family: str) -> tuple[Run, int]:
    d, number = inst.get("sdst"), inst.get("simm16")
    signed = number - 0x10000 if number & 0x8000 else number
    read, write = scalar_reader(d, 32, inst, family), scalar_writer(d, 32, inst, family)
    fixed = np.array([signed & 0xFFFFFFFF], _U)
    touched = scalar_bits(d, 32, family)

    def move(g: Group) -> None:
        write(g, fixed)

    def move_if(g: Group) -> None:
        write(g, np.where(g.scc, fixed, read(g)))

    def add(g: Group) -> None:
        value, scc = add_signed(read(g), fixed)
        write(g, value)
        g.scc[:] = scc

    def multiply(g: Group) -> None:
        write(g, read(g) * fixed)

    simple = {"s_movk_i32": move, "s_cmovk_i32": move_if, "s_addk_i32": add, "s_mulk_i32": multiply}
    if name in simple:
        return simple[name], touched
    if name.startswith("s_cmpk_"):
        function = COMPARES[name.replace("cmpk", "cmp")][2]
        other = fixed if name.endswith("_i32") else np.array([number], _U)

        def compare(g: Group) -> None:
            g.scc[:] = function(read(g), other)

        return compare, touched
    raise UnknownInstruction(inst.name, inst.address)


_SIZES = {"b32": 1, "b64": 2, "b96": 3, "b128": 4, "b256": 8, "b512": 16, "dword": 1}
_SIZES |= {f"dwordx{n}": n for n in (2, 4, 8, 16)}


def bind_scalar_load(inst: Decoded, family: str, memory: Memory, counter: str) -> tuple[Run, int]:
    """s_load_*: dwords at a scalar address. Buffer forms are not used by compilers for these kernels."""
    size = _SIZES.get(inst.name.removeprefix("s_load_"))
    if not inst.name.startswith("s_load_") or size is None:
        raise UnknownInstruction(inst.name, inst.address)
    base, target = 2 * inst.get("sbase"), inst.get("sdata")
    offset, register = _scalar_offset(inst, family)
    read_base = scalar_reader(base, 64, inst, family)
    read_offset = None if register is None else scalar_reader(register, 32, inst, family)
    filled = sgpr_bits(target, size)

    def run(g: Group) -> None:
        address = read_base(g) + np.uint64(offset & 0xFFFFFFFFFFFFFFFF)
        if read_offset is not None:
            address = address + read_offset(g)
        address = np.broadcast_to(address & ~np.uint64(3), (g.width,))
        g.s[target : target + size] = memory.load(np.ascontiguousarray(address), 4, size, inst.address)
        g.issue(counter, Outstanding(inst.name, inst.address, filled, in_order=False))

    touched = sgpr_bits(base, 2) | filled
    return run, touched if register is None else touched | scalar_bits(register, 32, family)


def _scalar_offset(inst: Decoded, family: str) -> tuple[int, int | None]:
    """The constant and the register that are added to the base."""
    if family == "gfx94x":
        register = inst.get("soffset") if inst.get("soffset_en") else None
        if not inst.get("imm"):
            return 0, inst.get("offset") & 0x7F if register is None else register
        return _signed(inst.get("offset"), 21), register
    code = inst.get("soffset")
    constant = _signed(inst.get("ioffset"), 24) if family == "gfx12" else _signed(inst.get("offset"), 21)
    return constant, None if code == null_code(family) else code


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value
