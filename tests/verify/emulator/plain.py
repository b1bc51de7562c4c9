"""Plain-Python statements of number formats and arithmetic, written from AMD's pseudocode with integers and fractions.

Nothing here uses numpy arithmetic or the emulator: it is the other side of the comparison.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from rocm_sd.verify.emulator import convert

FORMATS = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52)}
FLOATS = tuple(FORMATS)


def width(kind: str) -> int:
    return 16 if kind == "bf16" else int(kind.lstrip("abcdefghijklmnopqrstuvwxyz"))


def signed(bits: int, size: int) -> int:
    bits &= (1 << size) - 1
    return bits - (1 << size) if bits >> (size - 1) else bits


def sign_of(bits: int, kind: str) -> int:
    return bits >> (width(kind) - 1) & 1


def decode(bits: int, kind: str) -> float:
    """Every one of the formats fits in Python's float."""
    exponent_bits, mantissa_bits = FORMATS[kind]
    bias = (1 << (exponent_bits - 1)) - 1
    exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = bits & ((1 << mantissa_bits) - 1)
    sign = -1.0 if sign_of(bits, kind) else 1.0
    if exponent == (1 << exponent_bits) - 1:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits)


def encode(value: float | Fraction, kind: str, *, negative_zero: bool = False, truncate: bool = False) -> int:
    """Bits of `value` rounded to nearest even, or towards zero."""
    exponent_bits, mantissa_bits = FORMATS[kind]
    bias = (1 << (exponent_bits - 1)) - 1
    infinity = ((1 << exponent_bits) - 1) << mantissa_bits
    top = 1 << (exponent_bits + mantissa_bits)
    if isinstance(value, float):
        if math.isnan(value):
            return infinity | 1 << (mantissa_bits - 1)
        if math.isinf(value):
            return infinity | (top if value < 0 else 0)
        negative_zero = negative_zero or math.copysign(1, value) < 0
    exact = Fraction(value)
    magnitude = abs(exact)
    sign = top if exact < 0 or (exact == 0 and negative_zero) else 0
    if magnitude == 0:
        return sign
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    exponent = max(exponent, 1 - bias)
    steps = magnitude / Fraction(2) ** (exponent - mantissa_bits)
    whole = steps.numerator // steps.denominator if truncate else round(steps)
    pattern = whole + ((exponent + bias - 1) << mantissa_bits)
    if pattern >= infinity:
        pattern = infinity - 1 if truncate else infinity
    return sign | pattern


def is_nan(bits: int, kind: str) -> bool:
    return math.isnan(decode(bits, kind))


def is_signalling(bits: int, kind: str) -> bool:
    return is_nan(bits, kind) and not bits >> (FORMATS[kind][1] - 1) & 1


def quiet(bits: int, kind: str) -> int:
    return bits | 1 << (FORMATS[kind][1] - 1)


def ulps_apart(a: int, b: int, kind: str) -> int:
    """Distance of two patterns on the number line of the format; NaNs are all one."""
    if is_nan(a, kind) or is_nan(b, kind):
        return 0 if is_nan(a, kind) and is_nan(b, kind) else 1 << 70

    def place(bits: int) -> int:
        magnitude = bits & ((1 << (width(kind) - 1)) - 1)
        return -magnitude if sign_of(bits, kind) else magnitude

    return abs(place(a) - place(b))


def fma(a: int, b: int, c: int, kind: str, target: str | None = None) -> int:
    """a * b + c, one rounding, on patterns."""
    x, y, z = (decode(bits, kind) for bits in (a, b, c))
    if not all(math.isfinite(v) for v in (x, y, z)):
        product = math.nan if math.isnan(x) or math.isnan(y) or (x == 0 and math.isinf(y)) else None
        if product is None:
            if math.isinf(x) and y == 0:
                product = math.nan
            elif math.isinf(x) or math.isinf(y):
                product = math.inf if (sign_of(a, kind) == sign_of(b, kind)) else -math.inf
            else:
                product = 0.0  # finite: it cannot matter beside an infinite or NaN addend
        return encode(product + z, target or kind)
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    negative = bool((sign_of(a, kind) ^ sign_of(b, kind)) & sign_of(c, kind))
    return encode(exact, target or kind, negative_zero=negative)


def run(vop, sources: list[list[int]], *, saturating: bool = False, extra: tuple = ()) -> object:
    """The emulator's answer on columns of raw patterns: a list of patterns, or of (pattern, bool) with a mask."""
    arrays = []
    for kind, column in zip(vop.sources, sources, strict=False):
        if kind == "mask":
            arrays.append(np.array([column], dtype=bool))
            continue
        if kind == "mix":
            kind = "f32"  # noqa: PLW2901 - op_sel_hi 0 reads the whole register
        raw = np.array([column], dtype=np.uint64 if kind in convert.WIDE else np.uint32)
        arrays.append(convert.to_type(raw, kind))
    function = vop.saturating if saturating else vop.function
    with np.errstate(all="ignore"):
        answer = function(*arrays, *extra)
    return unpack(answer, vop.result)


def unpack(answer, result: str) -> list:
    if result == "mask":
        return [bool(x) for x in answer[0]]
    if "+" in result:
        value_kind, other = result.split("+")
        values = unpack(answer[0], value_kind)
        others = unpack(answer[1], other)
        return list(zip(values, others, strict=True))
    kind = "f16" if result == "f16_high" else result
    return [int(x) for x in convert.from_type(answer, kind)[0]]
