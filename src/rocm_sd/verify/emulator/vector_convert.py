"""Conversions between types. Integer results truncate towards zero and saturate; NaN gives 0.

v_cvt_pk_u8_f32 and the v_cvt_*norm_* family are missing, because AMD's text does not say how they round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rocm_sd.verify.emulator import float_formats
from rocm_sd.verify.emulator.convert import from_type
from rocm_sd.verify.emulator.float_formats import SmallFloat, float_to_f16_toward_zero
from rocm_sd.verify.emulator.vector_types import Array, Vop, integer_dtype, integer_limits

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CONVERT", "EIGHT_BIT_FNUZ", "EIGHT_BIT_OCP"]


def _to_integer(name: str, prepare: Callable[[Array], Array] = np.trunc) -> Callable[[Array], Array]:
    low, high = integer_limits(name)
    kind = integer_dtype(name)

    def convert(value: Array) -> Array:
        # float64 holds every limit of a 32-bit integer exactly; float32 would round 2**31 - 1 up and wrap.
        whole = prepare(value).astype(np.float64)
        return np.where(np.isnan(whole), 0, np.clip(whole, low, high)).astype(np.int64).astype(kind)

    return convert


def _nearest_up(value: Array) -> Array:
    """floor(x + 0.5), the sum in float64 so that it does not round."""
    return np.floor(value.astype(np.float64) + 0.5)


def _narrow(name: str) -> Callable[[Array], Array]:
    low, high = integer_limits(name)
    kind = integer_dtype(name)
    return lambda value: np.clip(value, low, high).astype(kind)


def _astype(kind: type[np.generic]) -> Callable[[Array], Array]:
    return lambda value: value.astype(kind)


def _pair(convert: Callable[[Array], Array], packed: str) -> Callable[[Array, Array], Array]:
    return lambda a, b: from_type(np.stack(np.broadcast_arrays(convert(a), convert(b))), packed)


def _byte(number: int) -> Callable[[Array], Array]:
    return lambda bits: ((bits >> np.uint32(8 * number)) & np.uint32(0xFF)).astype(np.float32)


def _offset_i4(bits: Array) -> Array:
    """Sixteenths from -0.5 to 0.4375 by a 4-bit signed code."""
    code = (bits & np.uint32(15)).astype(np.int32)
    return (((code ^ 8) - 8) / 16.0).astype(np.float32)


def _saturate_pair_u8(pair: Array) -> Array:
    low, high = np.clip(pair, 0, 255).astype(np.uint16)
    return low | (high << np.uint16(8))


def _encode_pair(kind: SmallFloat) -> Callable[[Array, Array], Array]:
    def encode(a: Array, b: Array) -> Array:
        low, high = (kind.encode(x, saturate=False).astype(np.uint16) for x in (a, b))
        return low | (high << np.uint16(8))

    return encode


def _encode_stochastic(kind: SmallFloat) -> Callable[[Array, Array], Array]:
    """A random number is added to the mantissa bits that will be dropped; the mantissa wraps, as AMD's text says."""
    drop = np.uint32(32 - (23 - kind.mantissa_bits))

    def encode(value: Array, random: Array) -> Array:
        bits = value.view(np.uint32)
        mantissa = ((bits & np.uint32(0x7FFFFF)) + (random >> drop)) & np.uint32(0x7FFFFF)
        moved = ((bits & np.uint32(0xFF800000)) | mantissa).view(np.float32)
        return kind.encode(np.where(np.isfinite(value), moved, value), saturate=False)

    return encode


def _eight_bit(fp8: SmallFloat, bf8: SmallFloat, suffix: str) -> dict[str, Vop]:
    table: dict[str, Vop] = {}
    for name, kind in (("fp8", fp8), ("bf8", bf8)):
        source = f"{name}{suffix}"
        table |= {
            f"v_cvt_f32_{name}": Vop(lambda value: value, (source,), "f32"),
            f"v_cvt_pk_f32_{name}": Vop(lambda pair: pair, (f"{source}x2",), "pk_f32"),
            f"v_cvt_pk_{name}_f32": Vop(_encode_pair(kind), ("f32", "f32"), "u16"),
            f"v_cvt_sr_{name}_f32": Vop(_encode_stochastic(kind), ("f32", "u32"), source),
        }
    return table


def _plain() -> dict[str, Vop]:
    table: dict[str, Vop] = {}
    names: dict[str, type[np.generic]] = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
    for source, target in (("f32", "f16"), ("f16", "f32"), ("f64", "f32"), ("f32", "f64")):
        table[f"v_cvt_{target}_{source}"] = Vop(_astype(names[target]), (source,), target)
    for integer, floats in (("16", ("f16",)), ("32", ("f32", "f64"))):
        for sign in "iu":
            for kind in floats:
                table[f"v_cvt_{kind}_{sign}{integer}"] = Vop(_astype(names[kind]), (f"{sign}{integer}",), kind)
                whole = f"{sign}{integer}"
                table[f"v_cvt_{whole}_{kind}"] = Vop(_to_integer(whole), (kind,), whole)
    return table


def _build() -> dict[str, Vop]:
    table = _plain()
    for number in range(4):
        table[f"v_cvt_f32_ubyte{number}"] = Vop(_byte(number), ("u32",), "f32")
    for name in ("v_cvt_floor_i32_f32", "v_cvt_flr_i32_f32"):
        table[name] = Vop(_to_integer("i32", np.floor), ("f32",), "i32")
    for name in ("v_cvt_nearest_i32_f32", "v_cvt_rpi_i32_f32"):
        table[name] = Vop(_to_integer("i32", _nearest_up), ("f32",), "i32")
    for name in ("v_cvt_pk_rtz_f16_f32", "v_cvt_pkrtz_f16_f32"):
        table[name] = Vop(_pair(float_to_f16_toward_zero, "pk_f16"), ("f32", "f32"), "b32")
    two = ("f32", "f32")
    return table | {
        "v_cvt_i32_i16": Vop(_astype(np.int32), ("i16",), "i32"),
        "v_cvt_u32_u16": Vop(_astype(np.uint32), ("u16",), "u32"),
        "v_cvt_f32_bf16": Vop(lambda value: value, ("bf16",), "f32"),
        "v_cvt_off_f32_i4": Vop(_offset_i4, ("u32",), "f32"),
        "v_cvt_pk_i16_f32": Vop(_pair(_to_integer("i16"), "pk_i16"), two, "b32"),
        "v_cvt_pk_u16_f32": Vop(_pair(_to_integer("u16"), "pk_u16"), two, "b32"),
        "v_cvt_pk_i16_i32": Vop(_pair(_narrow("i16"), "pk_i16"), ("i32", "i32"), "b32"),
        "v_cvt_pk_u16_u32": Vop(_pair(_narrow("u16"), "pk_u16"), ("u32", "u32"), "b32"),
        "v_cvt_pk_f16_f32": Vop(_pair(_astype(np.float16), "pk_f16"), two, "b32"),
        "v_cvt_pk_bf16_f32": Vop(_pair(lambda value: value, "pk_bf16"), two, "b32"),
        "v_sat_pk_u8_i16": Vop(_saturate_pair_u8, ("pk_i16",), "u16"),
        "v_pack_b32_f16": Vop(lambda a, b: a.astype(np.uint32) | b.astype(np.uint32) << np.uint32(16), _B16, "b32"),
    }


_B16 = ("b16", "b16")

CONVERT = _build()

EIGHT_BIT_OCP = _eight_bit(float_formats.FP8, float_formats.BF8, "")
"""With the 8-bit formats of gfx950 and gfx12."""

EIGHT_BIT_FNUZ = _eight_bit(float_formats.FP8_FNUZ, float_formats.BF8_FNUZ, "_fnuz")
"""The same names on gfx94x, whose 8-bit formats have no infinity and no negative zero."""
