"""Narrow floating-point formats that numpy lacks: bf16 and the 8-bit ones, with IEEE round-to-nearest-even.

A value of such a format is held as float32, which represents every one of them exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from rocm_sd.verify.emulator.vector_types import Array

__all__ = [
    "BF8",
    "BF8_FNUZ",
    "FP8",
    "FP8_FNUZ",
    "SmallFloat",
    "bf16_to_float",
    "float_to_bf16",
    "float_to_f16_toward_zero",
    "quiet",
    "round_to_xf32",
]


def bf16_to_float(bits: Array) -> Array:
    """float32 value of 16-bit patterns (any unsigned dtype)."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float_to_bf16(value: Array) -> Array:
    """uint16 patterns of float32 values, rounded to nearest even; a NaN stays a NaN and becomes quiet."""
    bits = np.ascontiguousarray(value, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = value != value  # noqa: PLR0124 - only a NaN differs from itself
    if nan.any():
        rounded = np.where(nan, (bits >> np.uint32(16)) | np.uint32(0x40), rounded)
    return rounded.astype(np.uint16)


def float_to_f16_toward_zero(value: Array) -> Array:
    """float16 of float32, truncated: overflow gives the largest finite number, infinity and NaN stay."""
    rounded = value.astype(np.float16)
    back = rounded.astype(np.float32)
    away = np.abs(back) > np.abs(value)
    return np.where(away, (rounded.view(np.uint16) - np.uint16(1)).view(np.float16), rounded)


def round_to_xf32(value: Array) -> Array:
    """float32 with the mantissa rounded to xf32's ten bits, to nearest even as hipBLASLt's reference does."""
    bits = np.ascontiguousarray(value, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000)
    special = ~np.isfinite(value)
    return np.where(special, bits, rounded).view(np.float32)


_QUIET_BIT = {2: np.uint16(0x0200), 4: np.uint32(0x0040_0000), 8: np.uint64(0x0008_0000_0000_0000)}


def quiet(value: Array) -> Array:
    """The same floats with every signalling NaN made quiet; other values keep every bit."""
    unsigned = value.view(f"u{value.itemsize}")
    nan = value != value  # noqa: PLR0124 - only a NaN differs from itself
    return np.where(nan, unsigned | _QUIET_BIT[value.itemsize], unsigned).view(value.dtype)


@dataclass(frozen=True)
class SmallFloat:
    """An 8-bit float: one sign bit, `exponent_bits`, the rest mantissa.

    `fnuz` formats (gfx94x) have no infinity and no negative zero; their only NaN is 0x80. Of the OCP formats
    (gfx950, gfx12) E4M3 has no infinity and its NaN is 0x7F or 0xFF; E5M2 is a short IEEE format.
    """

    exponent_bits: int
    bias: int
    fnuz: bool
    has_infinity: bool

    @property
    def mantissa_bits(self) -> int:
        return 7 - self.exponent_bits

    def decode_one(self, pattern: int) -> float:
        sign = -1.0 if pattern & 0x80 else 1.0
        exponent = (pattern & 0x7F) >> self.mantissa_bits
        mantissa = pattern & ((1 << self.mantissa_bits) - 1)
        top = (1 << self.exponent_bits) - 1
        if self.fnuz and pattern == 0x80:
            return float("nan")
        if self.has_infinity and exponent == top:
            return float("nan") if mantissa else sign * float("inf")
        if not self.fnuz and not self.has_infinity and pattern & 0x7F == 0x7F:
            return float("nan")
        scale = 1 - self.bias if exponent == 0 else exponent - self.bias
        whole = mantissa if exponent == 0 else mantissa + (1 << self.mantissa_bits)
        return float(sign * whole * 2.0 ** (scale - self.mantissa_bits))

    def decode(self, patterns: Array) -> Array:
        """float32 values of 8-bit patterns (any integer dtype, value below 256)."""
        return _decode_table(self)[patterns]

    def encode(self, value: Array, *, saturate: bool = True) -> Array:
        """uint8 patterns, rounded to nearest even.

        Overflow gives the largest finite number when `saturate` (the clamp bit), else infinity or NaN, as the
        format has it. NaN stays NaN.
        """
        finite = _finite_table(self)
        magnitude = np.abs(value).astype(np.float64)
        above = np.searchsorted(finite, magnitude, side="left")
        upper = np.minimum(above, len(finite) - 1)
        lower = np.maximum(upper - 1, 0)
        middle = (finite[lower] + finite[upper]) / 2
        even_is_upper = upper % 2 == 0
        take_upper = (magnitude > middle) | ((magnitude == middle) & even_is_upper)
        code = np.where(take_upper, upper, lower).astype(np.uint8)
        # Half a step past the largest number is where rounding would leave the format.
        limit = finite[-1] + (finite[-1] - finite[-2]) / 2
        largest_is_even = (len(finite) - 1) % 2 == 0
        over = magnitude > limit if largest_is_even else magnitude >= limit
        code = np.where(over, self._overflow_code(saturate=saturate), code).astype(np.uint8)
        negative = np.signbit(value)
        if self.fnuz:
            negative = negative & (code != 0)
        signed = np.where(negative, code | np.uint8(0x80), code).astype(np.uint8)
        nan_code = np.uint8(0x80) if self.fnuz else np.uint8(0x7F)
        nan = value != value  # noqa: PLR0124 - only a NaN differs from itself
        return np.where(nan, nan_code, signed).astype(np.uint8)

    def _overflow_code(self, *, saturate: bool) -> int:
        largest = len(_finite_table(self)) - 1
        if saturate:
            return largest
        if self.fnuz:
            return 0x80
        return largest + 1


@lru_cache(maxsize=8)
def _decode_table(kind: SmallFloat) -> Array:
    return np.array([kind.decode_one(pattern) for pattern in range(256)], dtype=np.float32)


@lru_cache(maxsize=8)
def _finite_table(kind: SmallFloat) -> Array:
    """Every finite non-negative value in ascending order: the index is the bit pattern."""
    values = _decode_table(kind)[:128].astype(np.float64)
    return values[np.isfinite(values)]


FP8 = SmallFloat(exponent_bits=4, bias=7, fnuz=False, has_infinity=False)
BF8 = SmallFloat(exponent_bits=5, bias=15, fnuz=False, has_infinity=True)
FP8_FNUZ = SmallFloat(exponent_bits=4, bias=8, fnuz=True, has_infinity=False)
BF8_FNUZ = SmallFloat(exponent_bits=5, bias=16, fnuz=True, has_infinity=False)
