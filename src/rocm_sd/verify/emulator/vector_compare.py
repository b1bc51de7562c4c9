"""Comparisons, which give a lane mask, and the moves and selections that use one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rocm_sd.verify.emulator.vector_types import Array, Vop

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["COMPARE", "FLOAT_ORDER", "INTEGER_ORDER", "MOVE"]


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


def _compare() -> dict[str, Vop]:
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


COMPARE = _compare()

MOVE: dict[str, Vop] = {
    "v_mov_b16": Vop(_same, ("b16",), "b16"),
    "v_mov_b32": Vop(_same, ("b32",), "b32"),
    "v_mov_b64": Vop(_same, ("b64",), "b64"),
    "v_accvgpr_read_b32": Vop(_same, ("b32",), "b32"),
    "v_accvgpr_write_b32": Vop(_same, ("b32",), "b32"),
    "v_accvgpr_mov_b32": Vop(_same, ("b32",), "b32"),
    "v_accvgpr_read": Vop(_same, ("b32",), "b32"),
    "v_accvgpr_write": Vop(_same, ("b32",), "b32"),
    "v_swap_b32": Vop(lambda source, destination: (source, destination), ("b32", "b32"), "b32+b32", accumulates=True),
    "v_cndmask_b16": Vop(_select, ("b16", "b16", "mask"), "b16"),
    "v_cndmask_b32": Vop(_select, ("b32", "b32", "mask"), "b32"),
}
