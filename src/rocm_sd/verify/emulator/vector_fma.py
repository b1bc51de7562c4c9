"""Fused multiply-add: a * b + c with one rounding, in numpy, which has none."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from rocm_sd.verify.emulator.vector_types import Array

__all__ = ["fma"]

_F32_MIN_NORMAL = np.float32(2.0**-126)


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    total = a + b
    virtual = total - a
    return total, (a - (total - virtual)) + (b - virtual)


def _odd_sum(product: Array, addend: Array) -> Array:
    """product + addend in float64, rounded to odd: rounding that once more to float32 or float16 is then exact."""
    total, error = _two_sum(product, addend)
    bits = total.view(np.int64)
    inexact = (error != 0) & (bits & 1 == 0) & np.isfinite(total)
    if not inexact.any():
        return total
    # Away from zero adds one to the pattern, towards zero subtracts one, whatever the sign.
    step = np.where((error > 0) == (total > 0), np.int64(1), np.int64(-1))
    return np.where(inexact, bits + step, bits).view(np.float64)


def _fma32(a: Array, b: Array, c: Array) -> Array:
    product = np.multiply(a, b, dtype=np.float64)  # 48 significant bits: exact
    total = product + c
    result = total.astype(np.float32)
    # The second rounding can only go wrong where float64 landed halfway between two float32, or below the normals.
    # count_nonzero is three times as fast as any() on arrays of this size.
    doubtful = (total.view(np.int64) & 0x1FFFFFFF) == 0x10000000
    if np.count_nonzero(np.abs(result) <= _F32_MIN_NORMAL):
        doubtful |= (np.abs(total) < _F32_MIN_NORMAL) & (total != 0)
    if np.count_nonzero(doubtful):
        return _odd_sum(product, c.astype(np.float64)).astype(np.float32)
    return result


def _fma16(a: Array, b: Array, c: Array) -> Array:
    return _odd_sum(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)).astype(np.float16)


def _split(a: Array) -> tuple[Array, Array]:
    scaled = a * np.float64(134217729.0)
    high = scaled - (scaled - a)
    return high, a - high


def _fma64(a: Array, b: Array, c: Array) -> Array:
    """Boldo and Melquiond: exact product and sums, the tails joined with rounding to odd, one final rounding."""
    a, b, c = np.broadcast_arrays(a, b, c)
    product = a * b
    a_high, a_low = _split(a)
    b_high, b_low = _split(b)
    tail = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    carry, carry_tail = _two_sum(c, tail)
    head, head_tail = _two_sum(product, carry)
    result = head + _odd_sum(carry_tail, head_tail)
    # Splitting and tails need room in the exponent; the few values outside take exact rational arithmetic.
    magnitudes = np.stack([np.abs(a), np.abs(b), np.abs(c), np.abs(product)])
    roomy = ((magnitudes < 2.0**960) & ((magnitudes > 2.0**-900) | (magnitudes == 0))).all(axis=0)
    exact_zero = (a == 0) | (b == 0)
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    # A finite product may overflow here and must not meet an infinite addend as infinity.
    special = np.where(np.isfinite(a) & np.isfinite(b) & ~np.isfinite(c), c, product + c)
    result = np.where(finite & ~exact_zero, result, special)
    for place in np.argwhere(finite & ~exact_zero & ~roomy):
        index = tuple(place)
        result[index] = _fma64_exact(float(a[index]), float(b[index]), float(c[index]))
    return np.asarray(result)


def _fma64_exact(a: float, b: float, c: float) -> float:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c
    try:
        return float(exact)
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c with one rounding, in the type of the sources."""
    if a.dtype == np.float32:
        return _fma32(a, b, c)
    return _fma16(a, b, c) if a.dtype == np.float16 else _fma64(a, b, c)
