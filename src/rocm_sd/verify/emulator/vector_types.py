"""What the engine needs to know of a vector instruction besides its encoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Array", "Vop", "exact_vop", "integer_dtype", "integer_limits"]

# An ndarray. The dtype is chosen at run time, and numpy types every expression over such arrays as Any: a narrower name
# would only move casts into the arithmetic.
Array: TypeAlias = Any


@dataclass(frozen=True)
class Vop:
    """function(*sources) -> result, on arrays of the named types (see convert.to_type), element by element.

    Sources stand in the order src0, src1, src2 or the literal of fmaak/fmamk; after them come implicit ones:
    "mask" is a lane mask as bool [W, L] (vcc, or the sgpr the encoding names), "lane" the lane numbers as uint32 [L],
    "bitop3" the truth table as an int. `accumulates`: the last source is the old value of the destination.
    Results: a type name; "mask"; "f32+mask" and its kin, a tuple of value and mask; "b32+b32", the new destination and
    the new source of a swap. `saturating` replaces `function` when the clamp bit is set on an integer instruction;
    `unfused` does so for a multiply-add whose product is known to need no rounding.
    """

    function: Callable[..., Any]
    sources: tuple[str, ...]
    result: str
    accumulates: bool = False
    saturating: Callable[..., Any] | None = None
    unfused: Callable[..., Any] | None = None


def integer_limits(name: str) -> tuple[int, int]:
    width = int(name[1:])
    return (-(1 << (width - 1)), (1 << (width - 1)) - 1) if name[0] == "i" else (0, (1 << width) - 1)


def exact_vop(sources: tuple[str, ...], result: str, wide: Callable[..., Array], *, accumulates: bool = False) -> Vop:
    """An integer instruction: `wide` is exact on int64 copies of the sources, and the result wraps or saturates."""
    low, high = integer_limits(result)
    kind = integer_dtype(result)

    def wrapped(*values: Array) -> Array:
        return wide(*(value.astype(np.int64) for value in values)).astype(kind)

    def saturated(*values: Array) -> Array:
        return np.clip(wide(*(value.astype(np.int64) for value in values)), low, high).astype(kind)

    return Vop(wrapped, sources, result, accumulates, saturated)


def integer_dtype(name: str) -> Any:
    return np.dtype(f"{name[0]}{int(name[1:]) // 8}")
