"""Floating-point vector instructions: arithmetic, extremes, roots, exponentials, and the table of all.

AMD's pseudocode is the specification. v_exp, v_log, v_rcp, v_rsq, v_sqrt, v_sin and v_cos are approximations of about
one unit in the last place on the hardware; here they are computed in float64 and rounded once, so a result may differ
from silicon in its last bit. The float32 ones take and give no subnormals there, which LLVM's lowering works round
by scaling; the same is done here so that code that forgot to scale is seen.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from rocm_sd.verify.emulator.float_formats import quiet
from rocm_sd.verify.emulator.vector_division import div_fixup, div_fmas, div_scale, ldexp
from rocm_sd.verify.emulator.vector_fma import fma
from rocm_sd.verify.emulator.vector_types import Array, Vop

if TYPE_CHECKING:
    from collections.abc import Callable

    _Two = Callable[[Array, Array], Array]

__all__ = ["FLOAT", "extremes"]


def fma_legacy(a: Array, b: Array, c: Array) -> Array:
    return np.where((a == 0) | (b == 0), c, fma(a, b, c))


def mul_legacy(a: Array, b: Array) -> Array:
    return np.where((a == 0) | (b == 0), np.float32(0), a * b)


def _mad(a: Array, b: Array, c: Array) -> Array:
    """gfx9's unfused multiply-add: the product rounds too, and the float32 form takes and gives no subnormals."""
    if a.dtype == np.float32:
        a, b, c = _flushed(a), _flushed(b), _flushed(c)
        return _flushed(_flushed(a * b) + c)
    return a * b + c


def _signalling(value: Array) -> Array:
    quiet_bits = quiet(value).view(f"u{value.itemsize}")
    return np.asarray(quiet_bits != value.view(f"u{value.itemsize}"))


def _extreme(a: Array, b: Array, *, largest: bool, ieee: bool) -> Array:
    """The larger or smaller number: +0 is above -0, a NaN loses to a number.

    ieee (gfx9 and gfx11, whose kernels set ieee_mode): a signalling NaN wins and becomes quiet.
    """
    result = np.fmax(a, b) if largest else np.fmin(a, b)
    kind = f"u{result.itemsize}"
    if np.count_nonzero(result == 0):
        zeros = (a == 0) & (b == 0)
        a_bits, b_bits = a.view(kind), b.view(kind)
        signs = a_bits & b_bits if largest else a_bits | b_bits
        result = np.where(zeros, signs, result.view(kind)).view(result.dtype)
    # The sum is NaN where an operand is (and for opposite infinities, which the exact test below sorts out).
    if np.count_nonzero(np.isnan(a + b)):
        nan_a, nan_b = np.isnan(a), np.isnan(b)
        chosen = np.where(nan_a & nan_b, a if not ieee else quiet(a), np.where(nan_a, b, np.where(nan_b, a, result)))
        if ieee:
            chosen = np.where(_signalling(b), quiet(b), chosen)
            chosen = np.where(_signalling(a), quiet(a), chosen)
        else:
            chosen = quiet(chosen)
        result = chosen
    return np.asarray(result)


max_number = partial(_extreme, largest=True, ieee=True)
min_number = partial(_extreme, largest=False, ieee=True)


def _propagating(pick: _Two) -> _Two:
    """IEEE 754-2019 maximum and minimum: any NaN operand is the result, a signalling one first."""

    def extreme(a: Array, b: Array) -> Array:
        result = pick(a, b)
        nan_a, nan_b = a != a, b != b  # noqa: PLR0124 - only a NaN differs from itself
        if nan_a.any() or nan_b.any():
            result = np.where(nan_a, quiet(a), np.where(nan_b, quiet(b), result))
            result = np.where(_signalling(b) & ~_signalling(a), quiet(b), result)
        return result

    return extreme


def extremes(kind: str, high: _Two, low: _Two) -> dict[str, Vop]:
    """The instructions on two and on three values of one type, by the words of their names."""
    two, three = (kind, kind), (kind, kind, kind)
    return {
        "max": Vop(high, two, kind),
        "min": Vop(low, two, kind),
        "max3": Vop(_then(high, high), three, kind),
        "min3": Vop(_then(low, low), three, kind),
        "maxmin": Vop(_then(high, low), three, kind),
        "minmax": Vop(_then(low, high), three, kind),
        "med3": Vop(_median(high, low), three, kind),
    }


def _then(first: _Two, second: _Two) -> Callable[..., Array]:
    return lambda a, b, c: second(first(a, b), c)


def _median(largest: _Two, smallest: _Two) -> Callable[..., Array]:
    def middle(a: Array, b: Array, c: Array) -> Array:
        top = largest(largest(a, b), c)
        result = np.where(top == a, largest(b, c), np.where(top == b, largest(a, c), largest(a, b)))
        if a.dtype.kind != "f":
            return result
        nan = (a != a) | (b != b) | (c != c)  # noqa: PLR0124 - only a NaN differs from itself
        return np.where(nan, smallest(smallest(a, b), c), result) if nan.any() else result

    return middle


def _flushed(value: Array) -> Array:
    tiny = np.abs(value) < np.float32(2.0**-126)
    return np.where(tiny, np.copysign(np.float32(0), value), value) if np.count_nonzero(tiny) else value


def _approximation(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    def approximated(value: Array) -> Array:
        if value.dtype == np.float64:
            return function(value)
        if value.dtype == np.float16:
            return function(value.astype(np.float64)).astype(np.float16)
        return _flushed(function(_flushed(value).astype(np.float64)).astype(np.float32))

    return approximated


def _log2(x: Array) -> Array:
    return np.where(x < 0, np.nan, np.log2(np.abs(x)))


def _turns(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """v_sin and v_cos take turns, not radians; whole turns are taken off first, where nothing is lost."""
    return lambda x: function((x - np.floor(x)) * (2.0 * np.pi))


def _fract(x: Array) -> Array:
    """x - floor(x), kept below 1: for a tiny negative x the difference would round up to 1."""
    below_one = np.nextafter(x.dtype.type(1), x.dtype.type(0))
    return np.where(np.isinf(x), x.dtype.type(np.nan), np.minimum(x - np.floor(x), below_one))


def _frexp_exponent(kind: type[np.signedinteger]) -> Callable[[Array], Array]:
    def exponent(x: Array) -> Array:
        return np.where(np.isfinite(x), np.frexp(x)[1], 0).astype(kind)

    return exponent


def _frexp_mantissa(x: Array) -> Array:
    return np.where(np.isfinite(x), np.frexp(x)[0], x)


_UNARY: dict[str, Callable[..., Array]] = {
    "exp": _approximation(np.exp2),
    "log": _approximation(_log2),
    "rcp": _approximation(lambda x: 1.0 / x),
    "rsq": _approximation(lambda x: 1.0 / np.sqrt(x)),
    "sqrt": _approximation(np.sqrt),
    "sin": _approximation(_turns(np.sin)),
    "cos": _approximation(_turns(np.cos)),
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "rndne": np.rint,
    "fract": _fract,
    "frexp_mant": _frexp_mantissa,
}
_BINARY: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "subrev": lambda a, b: b - a,
    "mul": np.multiply,
}


def _of_every_width(kind: str) -> dict[str, Vop]:
    one, two, three = (kind,), (kind, kind), (kind, kind, kind)
    table = {name: Vop(function, one, kind) for name, function in _UNARY.items()}
    table |= {f"s_{name}": table[name] for name in ("exp", "log", "rcp", "rsq", "sqrt")}
    table |= {name: Vop(function, two, kind) for name, function in _BINARY.items()}
    table |= extremes(kind, max_number, min_number)
    gfx12 = extremes(kind, partial(_extreme, largest=True, ieee=False), partial(_extreme, largest=False, ieee=False))
    table |= {f"{name}_num": vop for name, vop in gfx12.items()}
    for name, vop in extremes(kind, _propagating(max_number), _propagating(min_number)).items():
        if name != "med3":
            table[name.replace("max", "maximum").replace("min", "minimum")] = vop
    table |= {
        "fma": Vop(fma, three, kind),
        "fmac": Vop(fma, three, kind, accumulates=True),
        "fmaak": Vop(fma, three, kind),
        "fmamk": Vop(lambda a, b, literal: fma(a, literal, b), three, kind),
        "div_fixup": Vop(div_fixup, three, kind),
    }
    if kind != "f16":
        table["div_scale"] = Vop(div_scale, three, f"{kind}+mask")
        table["div_fmas"] = Vop(div_fmas, (*three, "mask"), kind)
    return {f"v_{name}_{kind}": vop for name, vop in table.items()}


def _build() -> dict[str, Vop]:
    table = _of_every_width("f16") | _of_every_width("f32") | _of_every_width("f64")
    three, mix = ("f32", "f32", "f32"), ("mix", "mix", "mix")

    def fma_to_half(a: Array, b: Array, c: Array) -> Array:
        return fma(a, b, c).astype(np.float16)

    def unfused(a: Array, b: Array, c: Array) -> Array:
        return a * b + c

    def unfused_to_half(a: Array, b: Array, c: Array) -> Array:
        return (a * b + c).astype(np.float16)

    table |= {
        "v_ldexp_f16": Vop(ldexp, ("f16", "i16"), "f16"),
        "v_ldexp_f32": Vop(ldexp, ("f32", "i32"), "f32"),
        "v_ldexp_f64": Vop(ldexp, ("f64", "i32"), "f64"),
        "v_frexp_exp_i16_f16": Vop(_frexp_exponent(np.int16), ("f16",), "i16"),
        "v_frexp_exp_i32_f32": Vop(_frexp_exponent(np.int32), ("f32",), "i32"),
        "v_frexp_exp_i32_f64": Vop(_frexp_exponent(np.int32), ("f64",), "i32"),
        "v_rcp_iflag_f32": table["v_rcp_f32"],
        "v_mul_legacy_f32": Vop(mul_legacy, ("f32", "f32"), "f32"),
        "v_mul_dx9_zero_f32": Vop(mul_legacy, ("f32", "f32"), "f32"),
        "v_fma_dx9_zero_f32": Vop(fma_legacy, three, "f32"),
        "v_fmac_dx9_zero_f32": Vop(fma_legacy, three, "f32", accumulates=True),
        "v_mad_f16": Vop(_mad, ("f16", "f16", "f16"), "f16"),
        "v_mac_f16": Vop(_mad, ("f16", "f16", "f16"), "f16", accumulates=True),
        "v_mad_f32": Vop(_mad, three, "f32"),
        "v_mac_f32": Vop(_mad, three, "f32", accumulates=True),
        "v_madak_f32": Vop(_mad, three, "f32"),
        "v_madmk_f32": Vop(lambda a, b, literal: _mad(a, literal, b), three, "f32"),
    }
    # gfx9 spells the mix family v_mad_mix* in AMD's tables; from gfx906 on the hardware fuses it.
    for name in ("v_fma", "v_mad"):
        table |= {
            f"{name}_mix_f32": Vop(fma, mix, "f32", unfused=unfused),
            f"{name}_mixlo_f16": Vop(fma_to_half, mix, "f16", unfused=unfused_to_half),
            f"{name}_mixhi_f16": Vop(fma_to_half, mix, "f16_high", unfused=unfused_to_half),
        }
    for name in ("v_mad", "v_fma", "v_div_fixup"):
        table[f"{name}_legacy_f16"] = table[f"{name}_f16"]
    return table


FLOAT = _build()
