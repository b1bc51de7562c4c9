"""What scalar instructions compute: pure functions on one value for each wave, by canonical name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rocm_sd.verify.emulator.vector import FLOAT_ORDER, INTEGER_ORDER, VALU
from rocm_sd.verify.emulator.vector_int import add_carry, reverse_bits, sub_borrow

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["ALIASES", "COMPARES", "LOGIC", "ONE_SOURCE", "TWO_SOURCES", "add_signed", "fused"]

_U = np.uint32
_Q = np.uint64

# The same operation under the names of other families.
ALIASES = {
    "s_add_co_u32": "s_add_u32",
    "s_sub_co_u32": "s_sub_u32",
    "s_add_co_i32": "s_add_i32",
    "s_sub_co_i32": "s_sub_i32",
    "s_add_co_ci_u32": "s_addc_u32",
    "s_sub_co_ci_u32": "s_subb_u32",
    "s_addk_co_i32": "s_addk_i32",
    "s_andn2_b32": "s_and_not1_b32",
    "s_andn2_b64": "s_and_not1_b64",
    "s_orn2_b32": "s_or_not1_b32",
    "s_orn2_b64": "s_or_not1_b64",
    "s_andn2_saveexec_b64": "s_and_not1_saveexec_b64",
    "s_orn2_saveexec_b64": "s_or_not1_saveexec_b64",
    "s_andn1_saveexec_b64": "s_and_not0_saveexec_b64",
    "s_orn1_saveexec_b64": "s_or_not0_saveexec_b64",
    "s_andn1_wrexec_b64": "s_and_not0_wrexec_b64",
    "s_andn2_wrexec_b64": "s_and_not1_wrexec_b64",
    "s_ff1_i32_b32": "s_ctz_i32_b32",
    "s_ff1_i32_b64": "s_ctz_i32_b64",
    "s_flbit_i32_b32": "s_clz_i32_u32",
    "s_flbit_i32_b64": "s_clz_i32_u64",
    "s_min_num_f32": "s_min_f32",
    "s_max_num_f32": "s_max_f32",
}


def _i32(a: NDArray[Any]) -> NDArray[Any]:
    return a.view(np.int32)


def _i64(a: NDArray[Any]) -> NDArray[Any]:
    return a.view(np.int64)


def _f32(a: NDArray[Any]) -> NDArray[Any]:
    return a.view(np.float32)


def _f16(a: NDArray[Any]) -> NDArray[Any]:
    """Of the lower half."""
    return a.astype(np.uint16).view(np.float16)


def _bits(a: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(a, np.float32).view(_U)


def add_signed(a: Any, b: Any) -> Any:
    total = a + b
    return total, (~(a ^ b) & (a ^ total)) >> _U(31) != 0


def _sub_signed(a: Any, b: Any) -> Any:
    total = a - b
    return total, ((a ^ b) & (a ^ total)) >> _U(31) != 0


def _pick(take_first: Any, a: Any, b: Any) -> Any:
    return np.where(take_first, a, b), take_first


def _shift_add(amount: int) -> Callable[[Any, Any, Any], Any]:
    def run(a: Any, b: Any, _c: Any) -> Any:
        total = (a.astype(_Q) << _Q(amount)) + b
        return total.astype(_U), total >> _Q(32) != 0

    return run


def _extract(a: Any, b: Any, bits: int, signed: bool) -> Any:
    """Field of a: offset in the low bits of b, width in bits 16 to 22."""
    kind = _Q if bits == 64 else _U
    offset = (b & _U(bits - 1)).astype(_Q)
    width = np.minimum((b >> _U(16) & _U(0x7F)).astype(_Q), _Q(bits))
    wide = a.astype(_Q)
    if signed:
        wide = _i64(wide) if bits == 64 else _i32(a).astype(np.int64)
        wide = (wide >> offset.astype(np.int64)).astype(_Q)
    else:
        wide = wide >> offset
    mask = np.where(width >= _Q(64), ~_Q(0), (_Q(1) << np.minimum(width, _Q(63))) - _Q(1))
    found = wide & mask
    if signed:
        sign = np.where(width > 0, _Q(1) << (np.maximum(width, _Q(1)) - _Q(1)), _Q(0))
        found = (found ^ sign) - sign
    return found.astype(kind)


def _mask_bits(a: Any, b: Any, bits: int) -> Any:
    kind = _Q if bits == 64 else _U
    size, shift = a & kind(bits - 1), b & kind(bits - 1)
    return ((kind(1) << size) - kind(1)) << shift


def _nonzero(function: Callable[..., Any]) -> Callable[[Any, Any, Any], Any]:
    def run(a: Any, b: Any, _c: Any) -> Any:
        result = function(a, b)
        return result, result != 0

    return run


def _plain(function: Callable[..., Any]) -> Callable[[Any, Any, Any], Any]:
    return lambda a, b, _c: (function(a, b), None)


def _floats(function: Callable[..., Any]) -> Callable[[Any, Any, Any], Any]:
    return _plain(lambda a, b: _bits(function(_f32(a), _f32(b))))


LOGIC: dict[str, Callable[[Any, Any], Any]] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
    "and_not0": lambda a, b: ~a & b,
    "or_not0": lambda a, b: ~a | b,
    "and_not1": lambda a, b: a & ~b,
    "or_not1": lambda a, b: a | ~b,
}

# name: widths of both sources and of the result, and function(a, b, scc) -> (result, new scc or None to keep it).
_W, _D = (32, 32, 32), (64, 64, 64)
TWO_SOURCES: dict[str, tuple[tuple[int, int, int], Callable[[Any, Any, Any], Any]]] = {
    "s_add_u32": (_W, lambda a, b, _c: add_carry(a, b)),
    "s_sub_u32": (_W, lambda a, b, _c: sub_borrow(a, b)),
    "s_addc_u32": (_W, add_carry),
    "s_subb_u32": (_W, sub_borrow),
    "s_add_i32": (_W, lambda a, b, _c: add_signed(a, b)),
    "s_sub_i32": (_W, lambda a, b, _c: _sub_signed(a, b)),
    "s_absdiff_i32": (_W, _nonzero(lambda a, b: np.abs(_i32(a - b)).view(_U))),
    "s_lshl_b32": (_W, _nonzero(lambda a, b: a << (b & _U(31)))),
    "s_lshl_b64": ((64, 32, 64), _nonzero(lambda a, b: a << (b & _U(63)).astype(_Q))),
    "s_lshr_b32": (_W, _nonzero(lambda a, b: a >> (b & _U(31)))),
    "s_lshr_b64": ((64, 32, 64), _nonzero(lambda a, b: a >> (b & _U(63)).astype(_Q))),
    "s_ashr_i32": (_W, _nonzero(lambda a, b: (_i32(a) >> _i32(b & _U(31))).view(_U))),
    "s_ashr_i64": ((64, 32, 64), _nonzero(lambda a, b: (_i64(a) >> (b & _U(63)).astype(np.int64)).view(_Q))),
    **{f"s_lshl{n}_add_u32": (_W, _shift_add(n)) for n in (1, 2, 3, 4)},
    "s_min_i32": (_W, lambda a, b, _c: _pick(_i32(a) < _i32(b), a, b)),
    "s_min_u32": (_W, lambda a, b, _c: _pick(a < b, a, b)),
    "s_max_i32": (_W, lambda a, b, _c: _pick(_i32(a) >= _i32(b), a, b)),
    "s_max_u32": (_W, lambda a, b, _c: _pick(a >= b, a, b)),
    **{f"s_{name}_b32": (_W, _nonzero(function)) for name, function in LOGIC.items() if "not0" not in name},
    **{f"s_{name}_b64": (_D, _nonzero(function)) for name, function in LOGIC.items() if "not0" not in name},
    "s_bfe_u32": (_W, _nonzero(lambda a, b: _extract(a, b, 32, signed=False))),
    "s_bfe_i32": (_W, _nonzero(lambda a, b: _extract(a, b, 32, signed=True))),
    "s_bfe_u64": ((64, 32, 64), _nonzero(lambda a, b: _extract(a, b, 64, signed=False))),
    "s_bfe_i64": ((64, 32, 64), _nonzero(lambda a, b: _extract(a, b, 64, signed=True))),
    "s_bfm_b32": (_W, _plain(lambda a, b: _mask_bits(a, b, 32))),
    "s_bfm_b64": ((32, 32, 64), _plain(lambda a, b: _mask_bits(a.astype(_Q), b.astype(_Q), 64))),
    "s_mul_i32": (_W, _plain(lambda a, b: a * b)),
    "s_mul_hi_u32": (_W, _plain(lambda a, b: (a.astype(_Q) * b >> _Q(32)).astype(_U))),
    "s_mul_hi_i32": (_W, _plain(lambda a, b: (_i32(a).astype(np.int64) * _i32(b) >> np.int64(32)).astype(_U))),
    "s_mul_u64": (_D, _plain(lambda a, b: a * b)),
    "s_add_nc_u64": (_D, _plain(lambda a, b: a + b)),
    "s_sub_nc_u64": (_D, _plain(lambda a, b: a - b)),
    "s_cselect_b32": (_W, lambda a, b, c: (np.where(c, a, b), None)),
    "s_cselect_b64": (_D, lambda a, b, c: (np.where(c, a, b), None)),
    "s_pack_ll_b32_b16": (_W, _plain(lambda a, b: a & _U(0xFFFF) | b << _U(16))),
    "s_pack_lh_b32_b16": (_W, _plain(lambda a, b: a & _U(0xFFFF) | b & _U(0xFFFF0000))),
    "s_pack_hh_b32_b16": (_W, _plain(lambda a, b: a >> _U(16) | b & _U(0xFFFF0000))),
    "s_pack_hl_b32_b16": (_W, _plain(lambda a, b: a >> _U(16) | b << _U(16))),
    "s_add_f32": (_W, _floats(np.add)),
    "s_sub_f32": (_W, _floats(np.subtract)),
    "s_mul_f32": (_W, _floats(np.multiply)),
    "s_min_f32": (_W, _floats(np.fmin)),
    "s_max_f32": (_W, _floats(np.fmax)),
}


def _find(a: Any, bits: int, from_top: bool) -> Any:
    """Place of the lowest (or highest, counted from the top) set bit; -1 where there is none."""
    found = np.full(a.shape, -1, np.int32)
    kind = _Q if bits == 64 else _U
    for step in reversed(range(bits)):
        place = bits - 1 - step if from_top else step
        found = np.where((a >> kind(place)) & kind(1) != 0, np.int32(step), found)
    return found.view(_U)


def _population(a: Any) -> Any:
    return np.unpackbits(np.ascontiguousarray(a)[:, None].view(np.uint8), axis=1).sum(axis=1, dtype=_U)


def _kept(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda a: (function(a), None)


# name: widths of source and result, and function(a) -> (result, new scc or None).
ONE_SOURCE: dict[str, tuple[int, int, Callable[[Any], Any]]] = {
    "s_mov_b32": (32, 32, _kept(lambda a: a)),
    "s_mov_b64": (64, 64, _kept(lambda a: a)),
    "s_not_b32": (32, 32, lambda a: (~a, ~a != 0)),
    "s_not_b64": (64, 64, lambda a: (~a, ~a != 0)),
    "s_brev_b32": (32, 32, _kept(reverse_bits)),
    "s_brev_b64": (64, 64, _kept(reverse_bits)),
    "s_ctz_i32_b32": (32, 32, _kept(lambda a: _find(a, 32, from_top=False))),
    "s_ctz_i32_b64": (64, 32, _kept(lambda a: _find(a, 64, from_top=False))),
    "s_clz_i32_u32": (32, 32, _kept(lambda a: _find(a, 32, from_top=True))),
    "s_clz_i32_u64": (64, 32, _kept(lambda a: _find(a, 64, from_top=True))),
    "s_sext_i32_i8": (32, 32, _kept(lambda a: a.astype(np.int8).astype(_U))),
    "s_sext_i32_i16": (32, 32, _kept(lambda a: a.astype(np.int16).astype(_U))),
    "s_abs_i32": (32, 32, lambda a: (np.abs(_i32(a)).view(_U), a != 0)),
    "s_bcnt1_i32_b32": (32, 32, lambda a: (_population(a), a != 0)),
    "s_bcnt1_i32_b64": (64, 32, lambda a: (_population(a), a != 0)),
    "s_bcnt0_i32_b32": (32, 32, lambda a: (_population(~a), ~a != 0)),
    "s_bcnt0_i32_b64": (64, 32, lambda a: (_population(~a), ~a != 0)),
    "s_cvt_f32_i32": (32, 32, _kept(lambda a: _bits(_i32(a)))),
    "s_cvt_f32_u32": (32, 32, _kept(_bits)),
    "s_cvt_f32_f16": (32, 32, _kept(lambda a: _bits(_f16(a)))),
    "s_cvt_i32_f32": (32, 32, _kept(lambda a: VALU["v_cvt_i32_f32"].function(_f32(a)).view(_U))),
    "s_cvt_u32_f32": (32, 32, _kept(lambda a: VALU["v_cvt_u32_f32"].function(_f32(a)))),
    "s_ceil_f32": (32, 32, _kept(lambda a: _bits(np.ceil(_f32(a))))),
    "s_floor_f32": (32, 32, _kept(lambda a: _bits(np.floor(_f32(a))))),
    "s_trunc_f32": (32, 32, _kept(lambda a: _bits(np.trunc(_f32(a))))),
    "s_rndne_f32": (32, 32, _kept(lambda a: _bits(np.rint(_f32(a))))),
}


def _compares() -> dict[str, tuple[int, int, Callable[[Any, Any], Any]]]:
    """Vector compares under scalar names: an integer's `ne` is `lg` here."""
    table: dict[str, tuple[int, int, Callable[[Any, Any], Any]]] = {}
    for name, function in FLOAT_ORDER.items():
        table[f"s_cmp_{name}_f32"] = (32, 32, lambda a, b, f=function: f(_f32(a), _f32(b)))  # type: ignore[misc]
        table[f"s_cmp_{name}_f16"] = (32, 32, lambda a, b, f=function: f(_f16(a), _f16(b)))  # type: ignore[misc]
    for name, function in INTEGER_ORDER.items():
        word = "lg" if name == "ne" else name
        table[f"s_cmp_{word}_i32"] = (32, 32, lambda a, b, f=function: f(_i32(a), _i32(b)))  # type: ignore[misc]
        table[f"s_cmp_{word}_u32"] = (32, 32, function)
        if word in ("eq", "lg"):
            table[f"s_cmp_{word}_u64"] = (64, 64, function)
    table["s_bitcmp0_b32"] = (32, 32, lambda a, b: a >> (b & _U(31)) & _U(1) == 0)
    table["s_bitcmp1_b32"] = (32, 32, lambda a, b: a >> (b & _U(31)) & _U(1) != 0)
    table["s_bitcmp0_b64"] = (64, 32, lambda a, b: a >> (b & _U(63)).astype(_Q) & _Q(1) == 0)
    table["s_bitcmp1_b64"] = (64, 32, lambda a, b: a >> (b & _U(63)).astype(_Q) & _Q(1) != 0)
    return table


COMPARES = _compares()


def fused(x: Any, y: Any, z: Any) -> Any:
    """x * y + z with one rounding: the product of two float32 is exact in float64, the sum is then off by 2^-53."""
    return _bits((_f32(x).astype(np.float64) * _f32(y) + _f32(z)).astype(np.float32))
