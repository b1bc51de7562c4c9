"""Operand codes to functions that read and write registers, resolved once when an instruction is decoded.

Codes 0 to 127 are rows of the scalar file, 128 to 208 small integers, 240 to 248 common floats, 255 the literal that
follows the instruction, 256 and above vector registers.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from rocm_sd.verify.emulator.errors import UnknownInstruction
from rocm_sd.verify.emulator.wave import EXEC, VCC, sgpr_bits

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from rocm_sd.verify.emulator.decode import Decoded
    from rocm_sd.verify.emulator.wave import Group

__all__ = ["LITERAL", "VGPR", "constant", "scalar_bits", "scalar_source", "scalar_target", "signed_field"]

VGPR, LITERAL = 256, 255
_VCCZ, _EXECZ, _SCC = 251, 252, 253
_FLOATS = {240: 0.5, 241: -0.5, 242: 1.0, 243: -1.0, 244: 2.0, 245: -2.0, 246: 4.0, 247: -4.0, 248: 0.15915494309189532}
_FORMS = {"f16": "<e", "f32": "<f", "f64": "<d"}


def constant(code: int, kind: str, literal: int | None) -> int | None:  # noqa: PLR0911 - one a range of codes
    """Bits of an inline constant or literal as an operand of type `kind`, or None where the code is a register.

    A 64-bit float takes its literal as the upper half; a signed 64-bit integer extends it; others take it as it is.
    """
    element = kind.removeprefix("pk_")
    wide = element in ("f64", "i64", "u64", "b64")
    whole = (1 << 64) - 1 if wide else 0xFFFFFFFF
    if 128 <= code <= 192:
        return code - 128
    if 193 <= code <= 208:
        return (192 - code) & whole
    if code in _FLOATS:
        # Integer instructions of 32 and 64 bits see the pattern of the float of their own width.
        form = "f64" if wide else "f16" if element == "f16" else "f32"
        pattern = int.from_bytes(struct.pack(_FORMS[form], _FLOATS[code]), "little")
        return pattern >> 16 if element == "bf16" else pattern
    if code == LITERAL and literal is not None:
        if element == "f64":
            return literal << 32
        if element == "i64" and literal >> 31:
            return literal | 0xFFFFFFFF00000000
        return literal
    return None


def scalar_source(inst: Decoded, code: int, width: int) -> tuple[Callable[[Group], NDArray[Any]], int]:
    """A function that gives uint32 or uint64 of shape [W], or [1] for a constant, and the registers it reads."""
    return _reader(inst, code, width), scalar_bits(inst, code, width)


def _reader(inst: Decoded, code: int, width: int) -> Callable[[Group], NDArray[Any]]:
    value = constant(code, "i64" if width == 64 else "b32", inst.fields.get("literal"))
    if code == inst.null:
        value = 0
    if value is not None:
        fixed = np.array([value], np.uint64 if width == 64 else np.uint32)
        return lambda _: fixed
    if code < 128:
        if width == 64:
            return lambda g: g.s[code].astype(np.uint64) | g.s[code + 1].astype(np.uint64) << np.uint64(32)
        return lambda g: g.s[code]
    if code == _SCC:
        return lambda g: g.scc.astype(np.uint32)
    if code == _EXECZ:
        return lambda g: np.asarray(~g.exec.any(axis=1), np.uint32)
    if code == _VCCZ:
        return lambda g: np.asarray(~g.mask(VCC).any(axis=1), np.uint32)
    raise UnknownInstruction(inst.name, inst.address, f"scalar operand code {code}")


def scalar_target(inst: Decoded, code: int, width: int) -> tuple[Callable[[Group, NDArray[Any]], None], int]:
    """A function that writes values of shape [W] or [1], and the registers it fills."""
    if code == inst.null:
        return lambda _g, _value: None, 0
    if code >= 128:
        raise UnknownInstruction(inst.name, inst.address, f"scalar destination code {code}")
    touches_exec = code in (EXEC, EXEC + 1) or (width == 64 and code == EXEC - 1)

    def write(g: Group, value: NDArray[Any]) -> None:
        if width == 64:
            g.s[code] = value & np.uint64(0xFFFFFFFF)
            g.s[code + 1] = value >> np.uint64(32)
        else:
            g.s[code] = value
        if touches_exec:
            g.exec_changed()

    return write, sgpr_bits(code, width // 32)


def scalar_bits(inst: Decoded, code: int, width: int) -> int:
    return sgpr_bits(code, width // 32) if code < 128 and code != inst.null else 0


def signed_field(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value
