"""Packed instructions, two values a register (or a pair of registers), and dot products.

A packed source is [2, W, L], halves already chosen by op_sel (convert.packed_source); the element-wise functions of the
single-value instructions apply as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rocm_sd.verify.emulator.float_formats import bf16_to_float, float_to_bf16
from rocm_sd.verify.emulator.vector_float import FLOAT
from rocm_sd.verify.emulator.vector_int import INTEGER
from rocm_sd.verify.emulator.vector_types import Array, Vop

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PACKED_OPS"]


def _as_bf16(value: Array) -> Array:
    return bf16_to_float(float_to_bf16(value))


def _dot_float(kind: type[np.floating] | None) -> Callable[[Array, Array, Array], Array]:
    """c + a0*b0 + a1*b1 from left to right; products of half-width floats are exact in float32, each sum rounds."""

    def dot(a: Array, b: Array, c: Array) -> Array:
        total = c.astype(np.float32)
        for x, y in zip(a, b, strict=True):
            total = total + x.astype(np.float32) * y.astype(np.float32)
            if kind is None:
                total = _as_bf16(total)
            elif kind is np.float16:
                total = total.astype(np.float16).astype(np.float32)
        return total.astype(kind) if kind is not None else total

    return dot


def _dot_integer(a: Array, b: Array, c: Array) -> Array:
    total = c.astype(np.int64)
    for x, y in zip(a, b, strict=True):
        total = total + x.astype(np.int64) * y.astype(np.int64)
    return total.astype(c.dtype)


def _dot_integer_saturating(a: Array, b: Array, c: Array) -> Array:
    total = c.astype(np.int64)
    for x, y in zip(a, b, strict=True):
        total = total + x.astype(np.int64) * y.astype(np.int64)
    limits = np.iinfo(c.dtype)
    return np.clip(total, limits.min, limits.max).astype(c.dtype)


def _dot(a: str, b: str, c: str, *, accumulates: bool = False) -> Vop:
    return Vop(_dot_integer, (a, b, c), c, accumulates=accumulates, saturating=_dot_integer_saturating)


def _lifted(vop: Vop, kind: str) -> Vop:
    return Vop(vop.function, (kind,) * len(vop.sources), kind, vop.accumulates, vop.saturating)


def _from_singles() -> dict[str, Vop]:
    table: dict[str, Vop] = {}
    floats = ("add", "mul", "fma", "fmac", "max", "min", "max_num", "min_num", "maximum", "minimum")
    for name in (*floats, "maximum3", "minimum3"):
        table[f"v_pk_{name}_f16"] = _lifted(FLOAT[f"v_{name}_f16"], "pk_f16")
    for name in ("add", "mul", "fma"):
        table[f"v_pk_{name}_f32"] = _lifted(FLOAT[f"v_{name}_f32"], "pk_f32")
    for kind in ("i16", "u16"):
        for name in ("add", "sub", "mad", "max", "min"):
            table[f"v_pk_{name}_{kind}"] = _lifted(INTEGER[f"v_{name}_{kind}"], f"pk_{kind}")
    table |= {
        "v_pk_mul_lo_u16": _lifted(INTEGER["v_mul_lo_u16"], "pk_u16"),
        "v_pk_lshlrev_b16": _lifted(INTEGER["v_lshlrev_b16"], "pk_u16"),
        "v_pk_lshrrev_b16": _lifted(INTEGER["v_lshrrev_b16"], "pk_u16"),
        "v_pk_ashrrev_i16": Vop(INTEGER["v_ashrrev_i16"].function, ("pk_u16", "pk_i16"), "pk_i16"),
    }
    return table


def _build() -> dict[str, Vop]:
    f16, bf16 = "pk_f16", "pk_bf16"
    table = _from_singles()
    table |= {
        # Both halves are named by op_sel, one of each source; op_sel_hi plays no part.
        "v_pk_mov_b32": Vop(lambda a, b: np.stack(np.broadcast_arrays(a[0], b[0])), ("pk_b32", "pk_b32"), "pk_b32"),
        "v_dot2_f32_f16": Vop(_dot_float(np.float32), (f16, f16, "f32"), "f32"),
        "v_dot2_f32_bf16": Vop(_dot_float(np.float32), (bf16, bf16, "f32"), "f32"),
        "v_dot2_f16_f16": Vop(_dot_float(np.float16), (f16, f16, "f16"), "f16"),
        "v_dot2_bf16_bf16": Vop(_dot_float(None), (bf16, bf16, "bf16"), "bf16"),
        "v_dot2_i32_i16": _dot("pk_i16", "pk_i16", "i32"),
        "v_dot2_u32_u16": _dot("pk_u16", "pk_u16", "u32"),
        "v_dot2c_i32_i16": _dot("pk_i16", "pk_i16", "i32", accumulates=True),
        "v_dot4_i32_i8": _dot("i8x4", "i8x4", "i32"),
        "v_dot4c_i32_i8": _dot("i8x4", "i8x4", "i32", accumulates=True),
        "v_dot4_u32_u8": _dot("u8x4", "u8x4", "u32"),
        "v_dot4_i32_iu8": _dot("iu8x4", "iu8x4", "i32"),
        "v_dot8_i32_i4": _dot("i4x8", "i4x8", "i32"),
        "v_dot8c_i32_i4": _dot("i4x8", "i4x8", "i32", accumulates=True),
        "v_dot8_u32_u4": _dot("u4x8", "u4x8", "u32"),
        "v_dot8_i32_iu4": _dot("iu4x8", "iu4x8", "i32"),
    }
    for name in ("v_dot2acc_f32_f16", "v_dot2c_f32_f16"):
        table[name] = Vop(_dot_float(np.float32), (f16, f16, "f32"), "f32", accumulates=True)
    for name in ("v_dot2acc_f32_bf16", "v_dot2c_f32_bf16"):
        table[name] = Vop(_dot_float(np.float32), (bf16, bf16, "f32"), "f32", accumulates=True)
    for a in ("fp8", "bf8"):
        for b in ("fp8", "bf8"):
            table[f"v_dot4_f32_{a}_{b}"] = Vop(_dot_float(np.float32), (f"{a}x4", f"{b}x4", "f32"), "f32")
    return table


PACKED_OPS = _build()
