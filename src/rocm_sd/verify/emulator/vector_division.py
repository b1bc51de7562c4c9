"""The three steps of a division, v_div_scale, v_div_fmas and v_div_fixup, and scaling by powers of two."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rocm_sd.verify.emulator.float_formats import quiet
from rocm_sd.verify.emulator.vector_fma import fma

if TYPE_CHECKING:
    from rocm_sd.verify.emulator.vector_types import Array

__all__ = ["div_fixup", "div_fmas", "div_scale", "ldexp"]


def ldexp(x: Array, exponent: Array) -> Array:
    """x * 2**exponent with one rounding; any exponent beyond the format's reach acts like its limit."""
    limited = np.clip(exponent.astype(np.int32), -2200, 2200)
    if x.dtype == np.float64:
        return np.ldexp(x, limited)
    # float64 holds every float32 or float16 times 2**±300 exactly, and larger shifts end at 0 or infinity anyway.
    return np.ldexp(x.astype(np.float64), np.clip(limited, -400, 400)).astype(x.dtype)


_EXPONENT = {2: (10, 0x1F), 4: (23, 0xFF), 8: (52, 0x7FF)}


def _exponent(x: Array) -> Array:
    shift, mask = _EXPONENT[x.itemsize]
    return (x.view(f"u{x.itemsize}").astype(np.int64) >> shift) & mask


def _subnormal(x: Array) -> Array:
    return (np.abs(x) < np.finfo(x.dtype).tiny) & (x != 0)


_SIGN32, _EXPONENT32 = np.uint32(0x8000_0000), np.uint32(0x7F80_0000)
_LOWEST32, _REACH32 = np.uint32(127 - 40 << 23), np.uint32(80 << 23)


def _moderate(*values: Array) -> bool:
    """Whether these are float32 between 2**-40 and 2**41 throughout: no step of a division has to be careful there."""
    for value in values:
        if value.dtype != np.float32:
            return False
        exponent = value.view(np.uint32) & _EXPONENT32
        # Below the lowest the difference wraps round and is large.
        if np.count_nonzero(exponent - _LOWEST32 > _REACH32):
            return False
    return True


def div_scale(value: Array, denominator: Array, numerator: Array) -> tuple[Array, Array]:
    """First step of a division: `value`, one of the other two, scaled out of danger, and whether to scale back.

    AMD's text differs in three places that cannot be meant: it asks whether 1 / denominator is a float64 subnormal,
    which no float32 reaches; where the quotient is one too it scales a denominator near the top further up; and a
    quotient that is too small for any subnormal is not scaled.
    """
    if _moderate(denominator, numerator):
        return value, np.zeros(np.broadcast_shapes(denominator.shape, numerator.shape), dtype=bool)
    double = value.dtype == np.float64
    near_top, scale, tiny_limit = (768, 128, 53) if double else (96, 64, 23)
    value, denominator, numerator = np.broadcast_arrays(value, denominator, numerator)
    top = 0x7FF if double else 0xFF
    above, below = _exponent(numerator), _exponent(denominator)
    apart = above - below
    ordinary = (below > 0) & (below < top - 2) & (above > tiny_limit) & (above < top) & (apart < near_top)
    if (ordinary & (apart > 3 - top // 2)).all():
        return value, np.zeros(value.shape, dtype=bool)
    reciprocal_tiny = _subnormal(value.dtype.type(1) / denominator)
    quotient_tiny = _subnormal(numerator / denominator) | ((numerator != 0) & (numerator / denominator == 0))
    is_denominator = value == denominator
    is_numerator = value == numerator
    up = ldexp(value, np.full(value.shape, scale))
    down = ldexp(value, np.full(value.shape, -scale))
    conditions = [
        (numerator == 0) | (denominator == 0),
        apart >= near_top,
        _subnormal(denominator),
        reciprocal_tiny & quotient_tiny,
        reciprocal_tiny,
        quotient_tiny,
        above <= tiny_limit,
    ]
    choices = [
        np.full(value.shape, np.nan, dtype=value.dtype),
        np.where(is_denominator, up, value),
        up,
        np.where(is_denominator, down, value),
        down,
        np.where(is_numerator, up, value),
        up,
    ]
    flags = [np.full(value.shape, flag) for flag in (False, True, False, True, False, True, False)]
    return np.select(conditions, choices, value), np.select(conditions, flags, default=False)


def div_fmas(a: Array, b: Array, c: Array, scale_back: Array) -> Array:
    """Fused multiply-add that undoes v_div_scale: a large quotient was scaled down by 2**64 (2**128), a small one up.

    AMD's text multiplies by 2**32 (2**64) always, which undoes neither. The rule used here is the one in tinygrad's
    emulator; with it the whole division sequence is correctly rounded. It was not compared with silicon here.
    """
    result = fma(a, b, c)
    if not np.count_nonzero(scale_back):
        return result
    bias, power = (1023, 128) if result.dtype == np.float64 else (127, 64)
    shift = np.where(_exponent(c) > bias, power, -power)
    return np.where(scale_back, ldexp(result, np.broadcast_to(shift, result.shape)), result)


def div_fixup(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """Last step of a division: the quotient's sign, and the answers for zeros, infinities and NaNs.

    As AMD's text has it: a NaN that an overflow left in `quotient` stays one.
    """
    if _moderate(denominator, numerator):
        signs = (denominator.view(np.uint32) ^ numerator.view(np.uint32)) & _SIGN32
        return (quotient.view(np.uint32) & ~_SIGN32 | signs).view(np.float32)
    quotient, denominator, numerator = np.broadcast_arrays(quotient, denominator, numerator)
    kind = quotient.dtype.type
    negative = np.signbit(denominator) ^ np.signbit(numerator)
    sign = np.where(negative, kind(-1), kind(1))
    infinite_d, infinite_n = np.isinf(denominator), np.isinf(numerator)
    zero_d, zero_n = denominator == 0, numerator == 0
    under = {2: -100000, 4: -150, 8: -1075}[quotient.itemsize]
    conditions = [
        np.isnan(numerator),
        np.isnan(denominator),
        (zero_d & zero_n) | (infinite_d & infinite_n),
        zero_d | infinite_n,
        infinite_d | zero_n,
        _exponent(numerator) - _exponent(denominator) < under,
    ]
    choices = [
        quiet(numerator),
        quiet(denominator),
        np.full(quotient.shape, -np.nan, dtype=quotient.dtype),
        np.copysign(kind(np.inf), sign),
        np.copysign(kind(0), sign),
        # A quotient this far below the smallest subnormal rounds to zero.
        np.copysign(kind(0), sign),
    ]
    return np.select(conditions, choices, np.copysign(np.abs(quotient), sign))
