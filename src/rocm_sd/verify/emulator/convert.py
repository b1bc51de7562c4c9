"""Registers are bits; instructions work on types. Everything between the two: views, halves, modifiers, SDWA.

Shapes: a register is uint32 [W, L] (scalars [W, 1]); a pair of registers is one uint64 array. Types that pack several
values in one register add a leading axis, lowest bits first: "pk_f16" is float16 [2, W, L], "u8x4" is int32 [4, W, L].
bf16 values are held as float32. Floating-point events are the caller's to silence (numpy.errstate(all="ignore")):
entering that context for every instruction would cost as much as the instruction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rocm_sd.verify.emulator import float_formats

if TYPE_CHECKING:
    from rocm_sd.verify.emulator.vector_types import Array

__all__ = [
    "EIGHT_BIT",
    "PACKED",
    "WIDE",
    "apply_modifiers",
    "clamp",
    "from_type",
    "join64",
    "mix_source",
    "omod",
    "packed_source",
    "sdwa_merge",
    "sdwa_select",
    "signed_or_unsigned",
    "split64",
    "to_type",
]

_LOW16 = np.uint32(0xFFFF)
_HIGH16 = np.uint32(0xFFFF0000)
_SIXTEEN = np.uint32(16)

_FULL = {"f32": np.float32, "i32": np.int32, "u32": np.uint32, "b32": np.uint32}
_HALF = {"f16": np.float16, "i16": np.int16, "u16": np.uint16, "b16": np.uint16}
_DOUBLE = {"f64": np.float64, "i64": np.int64, "u64": np.uint64, "b64": np.uint64}
EIGHT_BIT = {
    "fp8": float_formats.FP8,
    "bf8": float_formats.BF8,
    "fp8_fnuz": float_formats.FP8_FNUZ,
    "bf8_fnuz": float_formats.BF8_FNUZ,
}

WIDE = frozenset({*_DOUBLE, "pk_f32", "pk_b32"})
"""Types that occupy two consecutive registers; the engine reads them as uint64."""

PACKED = frozenset({"pk_f16", "pk_bf16", "pk_u16", "pk_i16", "pk_b16", "pk_f32", "pk_b32"})
"""Types whose two halves op_sel, op_sel_hi, neg_lo and neg_hi address; read them with `packed_source`."""


def join64(low: Array, high: Array) -> Array:
    return low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))


def split64(bits: Array) -> tuple[Array, Array]:
    return bits.astype(np.uint32), (bits >> np.uint64(32)).astype(np.uint32)


def to_type(bits: Array, name: str, high: bool = False, *, byte: int = 0) -> Array:
    """The value a register holds, seen as type `name`.

    high: the upper half of a 16-bit type (op_sel, .h) or the upper pair of bytes of an 8-bit pair; byte: which byte an
    8-bit float stands in.
    """
    if name in _FULL:
        return bits.view(_FULL[name])
    if name in _HALF or name == "bf16":
        half = _half_of(bits, high)
        return float_formats.bf16_to_float(half) if name == "bf16" else half.view(_HALF[name])
    if name in _DOUBLE:
        return bits.view(_DOUBLE[name])
    if name in PACKED:
        return packed_source(bits, name)
    if name in EIGHT_BIT:
        return EIGHT_BIT[name].decode((bits >> np.uint32(8 * byte)) & np.uint32(0xFF))
    return _to_vector(bits, name, high)


def _half_of(bits: Array, high: bool) -> Array:
    """The lower or upper 16 bits: of whole registers a view, which costs nothing."""
    if bits.shape[-1] > 1 and bits.strides[-1] == bits.itemsize:
        return bits.view(np.uint16)[..., int(high) :: 2]
    return (bits >> _SIXTEEN if high else bits).astype(np.uint16)


def _to_vector(bits: Array, name: str, high: bool) -> Array:
    element, _, count = name.partition("x")
    if not count:
        raise KeyError(name)
    base = 16 if high and count == "2" else 0
    width = {"u8": 8, "i8": 8, "u4": 4, "i4": 4}.get(element, 8)
    fields = [(bits >> np.uint32(base + width * i)) & np.uint32((1 << width) - 1) for i in range(int(count))]
    values = np.stack(fields)
    if element in EIGHT_BIT:
        return EIGHT_BIT[element].decode(values)
    signed = values.astype(np.int32)
    if element.startswith("i"):
        sign = np.int32(1 << (width - 1))
        signed = (signed ^ sign) - sign
    return signed


def signed_or_unsigned(name: str, signed: bool) -> str:
    """Type of an operand whose neg bit says signed: for "iu8x4" it is "i8x4", else "u8x4"."""
    return ("i" if signed else "u") + name.removeprefix("iu")


def from_type(value: Array, name: str, old: Array | None = None, high: bool = False, *, byte: int = 0) -> Array:
    """Register bits that hold `value`; the part of the register the type does not cover comes from `old`, else is 0."""
    if name in _FULL:
        return np.ascontiguousarray(value, dtype=_FULL[name]).view(np.uint32)
    if name in _DOUBLE:
        return np.ascontiguousarray(value, dtype=_DOUBLE[name]).view(np.uint64)
    if name in _HALF or name == "bf16":
        return _place16(_half_bits(value, name), old, high)
    if name == "f16_high":
        return _place16(_half_bits(value, "f16"), old, high=True)
    if name in PACKED:
        return _pack(value, name)
    if name in EIGHT_BIT:
        code = value if value.dtype == np.uint8 else EIGHT_BIT[name].encode(value)
        shift = np.uint32(8 * byte)
        placed = code.astype(np.uint32) << shift
        return placed if old is None else (old & ~(np.uint32(0xFF) << shift)) | placed
    raise KeyError(name)


def _half_bits(value: Array, name: str) -> Array:
    if name == "bf16":
        return float_formats.float_to_bf16(value)
    return np.ascontiguousarray(value, dtype=_HALF[name]).view(np.uint16)


def _place16(half: Array, old: Array | None, high: bool) -> Array:
    placed = half.astype(np.uint32)
    if high:
        placed = placed << _SIXTEEN
    if old is None:
        return placed
    return (old & (_LOW16 if high else _HIGH16)) | placed


def _pack(value: Array, name: str) -> Array:
    if name in WIDE:
        kind = np.float32 if name == "pk_f32" else np.uint32
        halves = np.ascontiguousarray(value, dtype=kind).view(np.uint32)
        return join64(halves[0], halves[1])
    halves16 = _half_bits(value, name.removeprefix("pk_")).astype(np.uint32)
    return halves16[0] | (halves16[1] << _SIXTEEN)


def packed_source(
    bits: Array,
    name: str,
    *,
    op_sel: bool = False,
    op_sel_hi: bool = True,
    neg_lo: bool = False,
    neg_hi: bool = False,
) -> Array:
    """[2, W, L]: element 0 is the half op_sel names, element 1 the half op_sel_hi names, each negated on request."""
    element = name.removeprefix("pk_")
    if name in WIDE:
        low, high = split64(bits)
        words = (high if op_sel else low, high if op_sel_hi else low)
        typed = [word.view(_FULL[element]) for word in words]
    else:
        typed = [to_type(bits, element, high=op_sel), to_type(bits, element, high=op_sel_hi)]
    if neg_lo:
        typed[0] = apply_modifiers(typed[0], negate=True)
    if neg_hi:
        typed[1] = apply_modifiers(typed[1], negate=True)
    return np.stack(typed)


def mix_source(bits: Array, *, op_sel: bool, op_sel_hi: bool, absolute: bool = False, negate: bool = False) -> Array:
    """A source of v_fma_mix*: float32, or where op_sel_hi is set the half that op_sel names, widened."""
    value = to_type(bits, "f16", high=op_sel).astype(np.float32) if op_sel_hi else to_type(bits, "f32")
    return apply_modifiers(value, absolute=absolute, negate=negate)


_SIGN = {2: np.uint16(0x8000), 4: np.uint32(0x8000_0000), 8: np.uint64(0x8000_0000_0000_0000)}


def apply_modifiers(value: Array, absolute: bool = False, negate: bool = False) -> Array:
    """|x| and -x as the hardware does them, on the sign bit: v_cndmask_b32 takes them too, and NaNs keep their bits."""
    if not (absolute or negate):
        return value
    sign = _SIGN[value.itemsize]
    bits = value.view(sign.dtype)
    if absolute:
        bits = bits & ~sign
    if negate:
        bits = bits ^ sign
    return bits.view(value.dtype)


def omod(value: Array, code: int) -> Array:
    """Output modifier of float results: 1 doubles, 2 quadruples, 3 halves."""
    if code == 0:
        return value
    factor = {1: 2.0, 2: 4.0, 3: 0.5}[code]
    return value * value.dtype.type(factor)


def clamp(value: Array) -> Array:
    """Float results limited to [0, 1]; NaN gives 0 (dx10_clamp, which every compiled kernel sets).

    An integer result saturates instead, which needs the sum before it wraps: use `Vop.saturating`.
    """
    one = value.dtype.type(1)
    zero = value.dtype.type(0)
    return np.where(value > zero, np.minimum(value, one), zero)


_SDWA_FIELDS = {0: (0, 8), 1: (8, 8), 2: (16, 8), 3: (24, 8), 4: (0, 16), 5: (16, 16)}


def sdwa_select(bits: Array, selection: int, sign_extend: bool = False) -> Array:
    """Sub-dword addressing of a source: 0..3 are the bytes, 4 and 5 the halves, 6 the whole register."""
    if selection == 6:
        return bits
    start, width = _SDWA_FIELDS[selection]
    field = (bits >> np.uint32(start)) & np.uint32((1 << width) - 1)
    if sign_extend:
        sign = np.uint32(1 << (width - 1))
        field = (field ^ sign) - sign
    return field


def sdwa_merge(result: Array, selection: int, unused: int, old: Array) -> Array:
    """Sub-dword destination: the result's low bits go to the field; the rest is 0, its sign (1) or `old` (2)."""
    if selection == 6:
        return result
    start, width = _SDWA_FIELDS[selection]
    field = result & np.uint32((1 << width) - 1)
    placed = field << np.uint32(start)
    if unused == 0:
        return placed
    if unused == 1:
        negative = (field >> np.uint32(width - 1)).astype(bool)
        above = np.uint32((0xFFFFFFFF << (start + width)) & 0xFFFFFFFF)
        return np.where(negative, placed | above, placed)
    return (old & ~np.uint32(((1 << width) - 1) << start)) | placed
