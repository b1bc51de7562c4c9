"""Integer and bitwise vector instructions. Sums and products wrap; shifts take the low bits of their count."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rocm_sd.verify.emulator.vector_float import extremes
from rocm_sd.verify.emulator.vector_types import Array, Vop, exact_vop

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["INTEGER", "add_carry", "reverse_bits", "sub_borrow"]

_U5 = np.uint32(31)
_ONE = np.uint32(1)


def _wide(value: Array) -> Array:
    return value.astype(np.uint64)


def _low24(value: Array) -> Array:
    return value.astype(np.int64) & 0xFFFFFF


def _signed24(value: Array) -> Array:
    return (_low24(value) ^ 0x800000) - 0x800000


def _low32(value: Array) -> Array:
    return value.astype(np.uint32)


def _high32(value: Array) -> Array:
    return (value >> value.dtype.type(32)).astype(np.uint32 if value.dtype.kind == "u" else np.int32)


def count_ones(value: Array) -> Array:
    value = value - ((value >> _ONE) & np.uint32(0x55555555))
    value = (value & np.uint32(0x33333333)) + ((value >> np.uint32(2)) & np.uint32(0x33333333))
    value = (value + (value >> np.uint32(4))) & np.uint32(0x0F0F0F0F)
    return (value * np.uint32(0x01010101)) >> np.uint32(24)


def reverse_bits(value: Array) -> Array:
    bits = np.unpackbits(np.ascontiguousarray(value)[..., None].view(np.uint8), axis=-1, bitorder="little")
    return np.packbits(bits[..., ::-1], axis=-1, bitorder="little").view(value.dtype)[..., 0]


def leading_zeros(value: Array) -> Array:
    """Place of the highest one counted from the top, -1 for zero."""
    # float64 holds every 32-bit integer, so its exponent is the position of the highest one.
    position = np.frexp(value.astype(np.float64))[1]
    return np.where(value == 0, -1, 32 - position).astype(np.int32)


def trailing_zeros(value: Array) -> Array:
    lowest = value & (~value + _ONE)
    return np.where(value == 0, -1, 31 - leading_zeros(lowest)).astype(np.int32)


def leading_signs(value: Array) -> Array:
    """How far below the top the first bit unlike the sign stands, -1 when all are alike."""
    return leading_zeros((value ^ (value >> np.int32(31))).view(np.uint32))


def _bfe_u32(value: Array, offset: Array, width: Array) -> Array:
    return (value >> (offset & _U5)) & ((_ONE << (width & _U5)) - _ONE)


def _bfe_i32(value: Array, offset: Array, width: Array) -> Array:
    bits = width & _U5
    field = (value >> (offset & _U5).astype(np.int32)).view(np.uint32) & ((_ONE << bits) - _ONE)
    sign = np.where(bits == 0, np.uint32(0), _ONE << ((bits - _ONE) & _U5))
    return ((field ^ sign) - sign).view(np.int32)


def _align(high: Array, low: Array, shift: Array) -> Array:
    return _low32(((_wide(high) << np.uint64(32)) | _wide(low)) >> _wide(shift))


def _permute_bytes_alike(high: Array, low: Array, select: int) -> Array:
    """One selector for all lanes, as compilers write it: bytes that move together move at once (5 times as fast)."""
    constant = 0
    moves: dict[tuple[bool, int], int] = {}
    signs: list[tuple[int, int]] = []
    for place in range(0, 32, 8):
        code = (select >> place) & 0xFF
        if code < 8:
            move = (code > 3, place - 8 * (code & 3))
            moves[move] = moves.get(move, 0) | 0xFF << place
        elif code < 12:
            signs.append((code - 8, place))
        elif code > 12:
            constant |= 0xFF << place
    result: Array = ((high ^ high) ^ (low ^ low)) | np.uint32(constant)
    for (upper, shift), mask in moves.items():
        source = high if upper else low
        moved = source << np.uint32(shift) if shift >= 0 else source >> np.uint32(-shift)
        result = result | (moved & np.uint32(mask))
    for sign, place in signs:
        bit = ((high if sign > 1 else low) >> np.uint32(31 if sign & 1 else 15)) & _ONE
        result = result | (bit * np.uint32(0xFF << place))
    return result


def permute_bytes(high: Array, low: Array, select: Array) -> Array:
    """v_perm_b32: selectors 0..7 pick a byte of {high, low}, 8..11 spread a sign, 12 is 0x00 and above it 0xFF."""
    first = select.flat[0]
    if select.size == 1 or (select.shape[-1] == 1 and not np.count_nonzero(select != first)):
        return _permute_bytes_alike(high, low, int(first))
    others = select != first
    second = select.flat[others.argmax()]
    if not np.count_nonzero(others & (select != second)):
        # Two selectors, as an exchange between halves of a wave has them.
        return np.where(
            others, _permute_bytes_alike(high, low, int(second)), _permute_bytes_alike(high, low, int(first))
        )
    high, low, select = np.broadcast_arrays(high, low, select)
    # Fourteen bytes a lane, one for each meaning of a selector.
    table = np.empty((*select.shape, 14), dtype=np.uint8)
    table[..., 0:4] = np.ascontiguousarray(low).view(np.uint8).reshape(*low.shape, 4)
    table[..., 4:8] = np.ascontiguousarray(high).view(np.uint8).reshape(*high.shape, 4)
    table[..., 8:12] = (table[..., 1:8:2] >> np.uint8(7)) * np.uint8(255)
    table[..., 12], table[..., 13] = 0, 255
    codes = np.ascontiguousarray(select).view(np.uint8).reshape(*select.shape, 4)
    chosen = np.take_along_axis(table, np.minimum(codes, np.uint8(13)).astype(np.intp), axis=-1)
    return chosen.view(np.uint32)[..., 0]


def add_carry(a: Array, b: Array, carry: Array | None = None) -> tuple[Array, Array]:
    total = _wide(a) + _wide(b)
    if carry is not None:
        total = total + carry.astype(np.uint64)
    return _low32(total), total > np.uint64(0xFFFFFFFF)


def sub_borrow(a: Array, b: Array, borrow: Array | None = None) -> tuple[Array, Array]:
    taken = _wide(b) if borrow is None else _wide(b) + borrow.astype(np.uint64)
    return _low32(_wide(a) - taken), taken > _wide(a)


def _mad_u64_u32(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    total = _wide(a) * _wide(b) + c
    return total, total < c


def _mad_i64_i32(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    """The second result is bit 64 of the exact sum: its sign, which differs from bit 63 after an overflow."""
    product = a.astype(np.int64) * b.astype(np.int64)
    total = product + c
    overflowed = ((product ^ total) & (c ^ total)) < 0
    return total, (total < 0) ^ overflowed


def _absolute_difference(a: Array, b: Array) -> Array:
    return np.where(a > b, a - b, b - a)


def _sad_u8(a: Array, b: Array, c: Array, *, skip_zero: bool = False) -> Array:
    total = c
    for place in range(0, 32, 8):
        x, y = (a >> np.uint32(place)) & np.uint32(255), (b >> np.uint32(place)) & np.uint32(255)
        difference = _absolute_difference(x, y)
        total = total + (np.where(y == 0, np.uint32(0), difference) if skip_zero else difference)
    return total


def _sad_u16(a: Array, b: Array, c: Array) -> Array:
    low, high, half = np.uint32(0xFFFF), np.uint32(16), _absolute_difference
    return c + half(a & low, b & low) + half(a >> high, b >> high)


def _lerp_u8(a: Array, b: Array, c: Array) -> Array:
    result: Array = np.uint32(0) * a
    for place in (np.uint32(s) for s in range(0, 32, 8)):
        byte = np.uint32(255)
        result = result | (((((a >> place) & byte) + ((b >> place) & byte) + ((c >> place) & _ONE)) >> _ONE) << place)
    return result


def _mbcnt(high: bool) -> Callable[[Array, Array, Array], Array]:
    """Ones of the mask that belong to lower lanes, counted in its low or high 32 lanes."""

    def count(mask: Array, start: Array, lane: Array) -> Array:
        below = np.clip(lane.astype(np.int64) - (32 if high else 0), 0, 32).astype(np.uint64)
        thread_mask = ((np.uint64(1) << below) - np.uint64(1)).astype(np.uint32)
        return count_ones(mask & thread_mask) + start

    return count


def _bitop3(a: Array, b: Array, c: Array, table: int) -> Array:
    result: Array = a ^ a
    for row in range(8):
        if table >> row & 1:
            result = result | (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return result


def _ashr_pk(low: int, high: int) -> Callable[[Array, Array, Array], Array]:
    def shift_and_pack(a: Array, b: Array, count: Array) -> Array:
        shift = (count & _U5).astype(np.int32)
        first, second = (np.clip(x >> shift, low, high).astype(np.uint16) & np.uint16(0xFF) for x in (a, b))
        return first | (second << np.uint16(8))

    return shift_and_pack


def _sources(kind: str, count: int) -> tuple[str, ...]:
    return (kind,) * count


def _left(shift: Array, value: Array) -> Array:
    return value << (shift & shift.dtype.type(8 * value.itemsize - 1)).astype(value.dtype)


def _right(shift: Array, value: Array) -> Array:
    return value >> (shift & shift.dtype.type(8 * value.itemsize - 1)).astype(value.dtype)


def _shifts() -> dict[str, Vop]:
    table: dict[str, Vop] = {}
    for bits in (16, 32, 64):
        count = f"u{min(bits, 32)}"
        table |= {
            f"v_lshlrev_b{bits}": Vop(_left, (count, f"u{bits}"), f"u{bits}"),
            f"v_lshrrev_b{bits}": Vop(_right, (count, f"u{bits}"), f"u{bits}"),
            f"v_ashrrev_i{bits}": Vop(_right, (count, f"i{bits}"), f"i{bits}"),
        }
    return table


def _sums() -> dict[str, Vop]:
    """Sums, and extremes of the same types. gfx9 says v_add_u32, later families v_add_nc_u32."""
    table: dict[str, Vop] = {}
    operations: dict[str, Callable[..., Array]] = {"add": np.add, "sub": np.subtract, "subrev": lambda a, b: b - a}
    for kind in ("u16", "i16", "u32", "i32"):
        for name, function in operations.items():
            vop = replace(exact_vop((kind, kind), kind, function), function=function)
            table |= {f"v_{name}_{kind}": vop, f"v_{name}_nc_{kind}": vop}
        if kind.endswith("16"):
            vop = exact_vop((kind, kind, kind), kind, _mad)
            table |= {f"v_mad_{kind}": vop, f"v_mad_legacy_{kind}": vop}
        table |= {f"v_{name}_{kind}": vop for name, vop in extremes(kind, np.maximum, np.minimum).items()}
    for name, with_carry, carrying in (
        ("v_add_co_u32", ("v_add_co_ci_u32", "v_addc_co_u32"), add_carry),
        ("v_sub_co_u32", ("v_sub_co_ci_u32", "v_subb_co_u32"), sub_borrow),
        ("v_subrev_co_u32", ("v_subrev_co_ci_u32", "v_subbrev_co_u32"), lambda a, b, *carry: sub_borrow(b, a, *carry)),
    ):
        table[name] = Vop(carrying, ("u32", "u32"), "u32+mask")
        table |= dict.fromkeys(with_carry, Vop(carrying, ("u32", "u32", "mask"), "u32+mask"))
    return table


def _mad(a: Array, b: Array, c: Array) -> Array:
    return a * b + c


def _logic() -> dict[str, Vop]:
    table: dict[str, Vop] = {}
    for bits in (16, 32):
        kind = f"u{bits}"
        two = _sources(kind, 2)
        table |= {
            f"v_and_b{bits}": Vop(np.bitwise_and, two, kind),
            f"v_or_b{bits}": Vop(np.bitwise_or, two, kind),
            f"v_xor_b{bits}": Vop(np.bitwise_xor, two, kind),
            f"v_xnor_b{bits}": Vop(lambda a, b: ~(a ^ b), two, kind),
            f"v_not_b{bits}": Vop(np.invert, (kind,), kind),
            f"v_bitop3_b{bits}": Vop(_bitop3, (*_sources(kind, 3), "bitop3"), kind),
        }
    three = _sources("u32", 3)
    ternary: dict[str, Callable[..., Array]] = {
        "v_add3_u32": lambda a, b, c: a + b + c,
        "v_or3_b32": lambda a, b, c: a | b | c,
        "v_xor3_b32": lambda a, b, c: a ^ b ^ c,
        "v_and_or_b32": lambda a, b, c: (a & b) | c,
        "v_xad_u32": lambda a, b, c: (a ^ b) + c,
        "v_lshl_add_u32": lambda a, b, c: (a << (b & _U5)) + c,
        "v_add_lshl_u32": lambda a, b, c: (a + b) << (c & _U5),
        "v_lshl_or_b32": lambda a, b, c: (a << (b & _U5)) | c,
        "v_bfi_b32": lambda a, b, c: (a & b) | (~a & c),
        "v_bfe_u32": _bfe_u32,
        "v_alignbit_b32": lambda a, b, c: _align(a, b, c & _U5),
        "v_alignbyte_b32": lambda a, b, c: _align(a, b, (c & np.uint32(3)) * np.uint32(8)),
        "v_perm_b32": permute_bytes,
        "v_sad_u8": _sad_u8,
        "v_msad_u8": lambda a, b, c: _sad_u8(a, b, c, skip_zero=True),
        "v_sad_hi_u8": lambda a, b, c: (_sad_u8(a, b, np.uint32(0) * c) << np.uint32(16)) + c,
        "v_sad_u16": _sad_u16,
        "v_sad_u32": lambda a, b, c: _absolute_difference(a, b) + c,
        "v_lerp_u8": _lerp_u8,
    }
    table |= {name: Vop(function, three, "u32") for name, function in ternary.items()}
    table |= {
        "v_bfe_i32": Vop(_bfe_i32, ("i32", "u32", "u32"), "i32"),
        "v_bfm_b32": Vop(lambda a, b: ((_ONE << (a & _U5)) - _ONE) << (b & _U5), _sources("u32", 2), "u32"),
        "v_lshl_add_u64": Vop(lambda a, b, c: (a << _wide(b & np.uint32(7))) + c, ("u64", "u32", "u64"), "u64"),
        "v_bfrev_b32": Vop(reverse_bits, ("u32",), "u32"),
        "v_bcnt_u32_b32": Vop(lambda a, b: count_ones(a) + b, _sources("u32", 2), "u32"),
        "v_mbcnt_lo_u32_b32": Vop(_mbcnt(high=False), ("u32", "u32", "lane"), "u32"),
        "v_mbcnt_hi_u32_b32": Vop(_mbcnt(high=True), ("u32", "u32", "lane"), "u32"),
        "v_prng_b32": Vop(lambda a: (a << _ONE) ^ ((a >> _U5) * np.uint32(197)), ("u32",), "u32"),
        "v_ashr_pk_i8_i32": Vop(_ashr_pk(-128, 127), ("i32", "i32", "u32"), "u16"),
        "v_ashr_pk_u8_i32": Vop(_ashr_pk(0, 255), ("i32", "i32", "u32"), "u16"),
    }
    for names, function, kind in (
        (("v_clz_i32_u32", "v_ffbh_u32"), leading_zeros, "u32"),
        (("v_ctz_i32_b32", "v_ffbl_b32"), trailing_zeros, "u32"),
        (("v_cls_i32", "v_ffbh_i32"), leading_signs, "i32"),
    ):
        table |= {name: Vop(function, (kind,), "i32") for name in names}
    return table


def _products() -> dict[str, Vop]:
    pair_u, pair_i = _sources("u32", 2), _sources("i32", 2)
    table = {
        "v_mul_lo_u32": Vop(np.multiply, pair_u, "u32"),
        "v_mul_lo_u16": Vop(np.multiply, _sources("u16", 2), "u16"),
        "v_mul_hi_u32": Vop(lambda a, b: _high32(_wide(a) * _wide(b)), pair_u, "u32"),
        "v_mul_hi_i32": Vop(lambda a, b: _high32(a.astype(np.int64) * b.astype(np.int64)), pair_i, "i32"),
        "v_mul_u32_u24": Vop(lambda a, b: _low32(_low24(a) * _low24(b)), pair_u, "u32"),
        "v_mul_hi_u32_u24": Vop(lambda a, b: _low32(_high32(_low24(a) * _low24(b))), pair_u, "u32"),
        "v_mul_i32_i24": Vop(lambda a, b: (_signed24(a) * _signed24(b)).astype(np.int32), pair_i, "i32"),
        "v_mul_hi_i32_i24": Vop(lambda a, b: _high32(_signed24(a) * _signed24(b)), pair_i, "i32"),
        "v_mad_u32_u24": exact_vop(_sources("u32", 3), "u32", lambda a, b, c: _low24(a) * _low24(b) + c),
        "v_mad_i32_i24": exact_vop(_sources("i32", 3), "i32", lambda a, b, c: _signed24(a) * _signed24(b) + c),
        "v_mad_u32_u16": exact_vop(("u16", "u16", "u32"), "u32", _mad),
        "v_mad_i32_i16": exact_vop(("i16", "i16", "i32"), "i32", _mad),
    }
    for unsigned, signed in (("v_mad_u64_u32", "v_mad_i64_i32"), ("v_mad_co_u64_u32", "v_mad_co_i64_i32")):
        table[unsigned] = Vop(_mad_u64_u32, ("u32", "u32", "u64"), "u64+mask")
        table[signed] = Vop(_mad_i64_i32, ("i32", "i32", "i64"), "i64+mask")
    return table


INTEGER: dict[str, Vop] = _shifts() | _sums() | _logic() | _products()
