"""Every vector instruction by its mnemonic, without encoding suffix: VALU["v_add_f32"].

Here stand comparisons, which give a lane mask, the moves and selections that use one, packed instructions, two values a
register (or a pair of registers), and dot products. A packed source is [2, W, L], halves already chosen by op_sel
(convert.packed_source); the element-wise functions of the single-value instructions apply as they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rocm_sd.verify.emulator.float_formats import bf16_to_float, float_to_bf16
from rocm_sd.verify.emulator.vector_convert import CONVERT, EIGHT_BIT_FNUZ, EIGHT_BIT_OCP
from rocm_sd.verify.emulator.vector_float import FLOAT
from rocm_sd.verify.emulator.vector_int import INTEGER
from rocm_sd.verify.emulator.vector_types import Array, Vop, exact_vop

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "FLOAT_ORDER", "INTEGER_ORDER", "VALU", "VALU_FNUZ", "VALU_OCP", "Vop", "valu_for", "zeroes_high_half",
]  # fmt: skip


def _never(a: Array, b: Array) -> Array:
    return np.zeros(np.broadcast_shapes(a.shape, b.shape), dtype=bool)


def _always(a: Array, b: Array) -> Array:
    return ~_never(a, b)


def _ordered(a: Array, b: Array) -> Array:
    return (a == a) & (b == b)  # noqa: PLR0124 - only a NaN differs from itself


_Order = dict[str, "Callable[[Array, Array], Array]"]
_ORDER: _Order = {
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
INTEGER_ORDER: _Order = _ORDER | {"ne": np.not_equal}
FLOAT_ORDER: _Order = _ORDER | {
    "lg": lambda a, b: (a < b) | (a > b),
    "o": _ordered,
    "u": lambda a, b: ~_ordered(a, b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": lambda a, b: ~(a == b),
    "nlt": lambda a, b: ~(a < b),
}
_CONSTANT: _Order = {"f": _never, "t": _always}
_CLASS_LAYOUT = {2: (10, 0x1F), 4: (23, 0xFF), 8: (52, 0x7FF)}


def float_class(value: Array) -> Array:
    """Number of the class bit a float belongs to: 0 signalling NaN, 1 quiet NaN, then -inf to +inf as 2 to 9."""
    mantissa_bits, top = _CLASS_LAYOUT[value.itemsize]
    bits = value.view(f"u{value.itemsize}").astype(np.uint64)
    exponent = (bits >> np.uint64(mantissa_bits)) & np.uint64(top)
    mantissa = bits & np.uint64((1 << mantissa_bits) - 1)
    is_quiet = (mantissa >> np.uint64(mantissa_bits - 1)).astype(bool)
    negative = np.signbit(value)
    magnitude = np.select(
        [(exponent == 0) & (mantissa == 0), exponent == 0, exponent < top, mantissa == 0],
        [np.uint32(0), np.uint32(1), np.uint32(2), np.uint32(3)],
        np.uint32(4),
    )
    ordinary = np.where(negative, np.uint32(5) - magnitude, np.uint32(6) + magnitude)
    return np.where(magnitude == 4, is_quiet.astype(np.uint32), ordinary).astype(np.uint32)


def _is_class(value: Array, mask: Array) -> Array:
    return ((mask.astype(np.uint32) >> float_class(value)) & np.uint32(1)).astype(bool)


def _compares() -> dict[str, Vop]:
    table: dict[str, Vop] = {}
    floats, integers = FLOAT_ORDER | _CONSTANT | {"tru": _always}, INTEGER_ORDER | _CONSTANT
    for prefix in ("v_cmp", "v_cmpx"):
        for kind in ("f16", "f32", "f64"):
            table |= {f"{prefix}_{name}_{kind}": Vop(test, (kind, kind), "mask") for name, test in floats.items()}
            # Ten class bits fit in 16; a half-precision compare may name an upper half for them too.
            table[f"{prefix}_class_{kind}"] = Vop(_is_class, (kind, "u16" if kind == "f16" else "u32"), "mask")
        for kind in ("i16", "u16", "i32", "u32", "i64", "u64"):
            table |= {f"{prefix}_{name}_{kind}": Vop(test, (kind, kind), "mask") for name, test in integers.items()}
    return table


def _select(a: Array, b: Array, mask: Array) -> Array:
    return np.where(mask, b, a)


def _same(a: Array) -> Array:
    return a


_MOVES: dict[str, Vop] = {
    "v_mov_b16": Vop(_same, ("b16",), "b16"),
    "v_mov_b32": Vop(_same, ("b32",), "b32"),
    "v_mov_b64": Vop(_same, ("b64",), "b64"),
    "v_swap_b32": Vop(lambda source, destination: (source, destination), ("b32", "b32"), "b32+b32", accumulates=True),
    "v_cndmask_b16": Vop(_select, ("b16", "b16", "mask"), "b16"),
    "v_cndmask_b32": Vop(_select, ("b32", "b32", "mask"), "b32"),
}


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


def _dot(several: str, total: str, *, accumulates: bool = False) -> Vop:
    def dot(a: Array, b: Array, c: Array) -> Array:
        return c + (a * b).sum(axis=0)

    return exact_vop((several, several, total), total, dot, accumulates=accumulates)


def _lifted(vop: Vop, kind: str) -> Vop:
    return replace(vop, sources=(kind,) * len(vop.sources), result=kind)


def _packed_singles() -> dict[str, Vop]:
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


def _packed() -> dict[str, Vop]:
    f16, bf16 = "pk_f16", "pk_bf16"
    table = _packed_singles()
    table |= {
        # Both halves are named by op_sel, one of each source; op_sel_hi plays no part.
        "v_pk_mov_b32": Vop(lambda a, b: np.stack(np.broadcast_arrays(a[0], b[0])), ("pk_b32", "pk_b32"), "pk_b32"),
        "v_dot2_f32_f16": Vop(_dot_float(np.float32), (f16, f16, "f32"), "f32"),
        "v_dot2_f32_bf16": Vop(_dot_float(np.float32), (bf16, bf16, "f32"), "f32"),
        "v_dot2_f16_f16": Vop(_dot_float(np.float16), (f16, f16, "f16"), "f16"),
        "v_dot2_bf16_bf16": Vop(_dot_float(None), (bf16, bf16, "bf16"), "bf16"),
        "v_dot2_i32_i16": _dot("pk_i16", "i32"),
        "v_dot2_u32_u16": _dot("pk_u16", "u32"),
        "v_dot2c_i32_i16": _dot("pk_i16", "i32", accumulates=True),
        "v_dot4_i32_i8": _dot("i8x4", "i32"),
        "v_dot4c_i32_i8": _dot("i8x4", "i32", accumulates=True),
        "v_dot4_u32_u8": _dot("u8x4", "u32"),
        "v_dot4_i32_iu8": _dot("iu8x4", "i32"),
        "v_dot8_i32_i4": _dot("i4x8", "i32"),
        "v_dot8c_i32_i4": _dot("i4x8", "i32", accumulates=True),
        "v_dot8_u32_u4": _dot("u4x8", "u32"),
        "v_dot8_i32_iu4": _dot("iu4x8", "i32"),
    }
    for kind in ("f16", "bf16"):
        vop = replace(table[f"v_dot2_f32_{kind}"], accumulates=True)
        table |= {f"v_dot2acc_f32_{kind}": vop, f"v_dot2c_f32_{kind}": vop}
    for a in ("fp8", "bf8"):
        for b in ("fp8", "bf8"):
            table[f"v_dot4_f32_{a}_{b}"] = Vop(_dot_float(np.float32), (f"{a}x4", f"{b}x4", "f32"), "f32")
    return table


VALU: dict[str, Vop] = FLOAT | INTEGER | _compares() | _MOVES | CONVERT | _packed()
"""What means the same on every architecture. The 8-bit floats do not: an engine that reads this table alone refuses
them by name instead of reading the wrong format."""

VALU_OCP: dict[str, Vop] = VALU | EIGHT_BIT_OCP
VALU_FNUZ: dict[str, Vop] = VALU | EIGHT_BIT_FNUZ


def valu_for(gfx: str) -> Mapping[str, Vop]:
    """The table of one architecture, by its gfx name."""
    if gfx.startswith("gfx94"):
        return VALU_FNUZ
    return VALU_OCP if gfx.startswith(("gfx95", "gfx12")) else VALU


_PRESERVING_ON_GFX9 = frozenset(
    {
        "v_mad_f16",
        "v_mac_f16",
        "v_fma_f16",
        "v_fmac_f16",
        "v_fmaak_f16",
        "v_fmamk_f16",
        "v_mad_u16",
        "v_mad_i16",
        "v_div_fixup_f16",
        "v_fma_mixlo_f16",
        "v_fma_mixhi_f16",
        "v_mad_mixlo_f16",
        "v_mad_mixhi_f16",
    }
)


def zeroes_high_half(mnemonic: str, gfx: str) -> bool:
    """Whether a 16-bit result clears the other half of its register.

    gfx10 and later keep it. gfx9 clears it, but for the multiply-adds that were new there and the 8-bit conversions
    (LLVM, GCNSubtarget::zeroesHigh16BitsOfDest).
    """
    if not gfx.startswith("gfx9") or mnemonic in _PRESERVING_ON_GFX9:
        return False
    return not mnemonic.startswith(("v_cvt_pk_fp8", "v_cvt_pk_bf8", "v_cvt_sr_", "v_cvt_scalef32"))
