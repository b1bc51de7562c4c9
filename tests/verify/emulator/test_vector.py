"""Integer, bitwise, comparison and move instructions against plain integer arithmetic."""

from __future__ import annotations

import itertools
import operator

import numpy as np
import plain
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import decode, is_nan, is_signalling, sign_of, signed, width

from rocm_sd.verify.emulator.vector import VALU, VALU_FNUZ, VALU_OCP, valu_for, zeroes_high_half

EXAMPLES = settings(max_examples=25, deadline=None, derandomize=True)
EDGES = {
    16: [0, 1, 2, 0x7F, 0xFF, 0x100, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF],
    32: [0, 1, 31, 0xFF, 0xFFFF, 0x800000, 0xFFFFFF, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF],
    64: [0, 1, 0xFFFFFFFF, 0x100000000, (1 << 63) - 1, 1 << 63, (1 << 64) - 2, (1 << 64) - 1],
}
MASK = {size: (1 << size) - 1 for size in (16, 32, 64)}


def value(bits: int, kind: str) -> int:
    size = width(kind)
    return signed(bits, size) if kind.startswith("i") else bits & MASK[size]


def clip(number: int, kind: str) -> int:
    size = width(kind)
    low, high = (-(1 << (size - 1)), (1 << (size - 1)) - 1) if kind[0] == "i" else (0, MASK[size])
    return max(low, min(high, number))


# --- what each instruction computes: exact integers in, an exact integer out, wrapped by the caller -------------------

ARITHMETIC = {}
for k in ("u16", "i16", "u32", "i32"):
    for stem, exact in {
        "add": operator.add,
        "sub": operator.sub,
        "subrev": lambda a, b: b - a,
    }.items():
        ARITHMETIC[f"v_{stem}_{k}"] = ARITHMETIC[f"v_{stem}_nc_{k}"] = exact
    ARITHMETIC |= {
        f"v_max_{k}": max,
        f"v_min_{k}": min,
        f"v_max3_{k}": max,
        f"v_min3_{k}": min,
        f"v_med3_{k}": lambda a, b, c: sorted((a, b, c))[1],
        f"v_maxmin_{k}": lambda a, b, c: min(max(a, b), c),
        f"v_minmax_{k}": lambda a, b, c: max(min(a, b), c),
    }
for k in ("u16", "i16"):
    ARITHMETIC[f"v_mad_{k}"] = ARITHMETIC[f"v_mad_legacy_{k}"] = lambda a, b, c: a * b + c


def u24(x):
    return x & 0xFFFFFF


def i24(x):
    return signed(x, 24)


def bit_field(x, offset, size):
    return (x >> (offset & 31)) & ((1 << (size & 31)) - 1)


def byte_of(x, n):
    return x >> 8 * n & 255


def perm(high, low, select):
    data = (high << 32 | low).to_bytes(8, "little")
    result = 0
    for place in range(4):
        code = byte_of(select, place)
        if code <= 7:
            byte = data[code]
        elif code <= 11:
            byte = 255 if data[2 * (code - 8) + 1] & 0x80 else 0
        else:
            byte = 0 if code == 12 else 255
        result |= byte << 8 * place
    return result


def first_one(text: str) -> int:
    return text.find("1")


def leading_sign(x):
    text = f"{x & MASK[32]:032b}"
    return next((i for i in range(1, 32) if text[i] != text[0]), -1)


def sad8(a, b, c=0, *, masked=False):
    pairs = [(byte_of(a, n), byte_of(b, n)) for n in range(4)]
    return c + sum(abs(x - y) for x, y in pairs if not masked or y)


ARITHMETIC |= {
    "v_mul_lo_u32": operator.mul,
    "v_mul_lo_u16": operator.mul,
    "v_mul_hi_u32": lambda a, b: a * b >> 32,
    "v_mul_hi_i32": lambda a, b: a * b >> 32,
    "v_mul_u32_u24": lambda a, b: u24(a) * u24(b),
    "v_mul_hi_u32_u24": lambda a, b: u24(a) * u24(b) >> 32,
    "v_mul_i32_i24": lambda a, b: i24(a) * i24(b),
    "v_mul_hi_i32_i24": lambda a, b: i24(a) * i24(b) >> 32,
    "v_mad_u32_u24": lambda a, b, c: u24(a) * u24(b) + c,
    "v_mad_i32_i24": lambda a, b, c: i24(a) * i24(b) + c,
    "v_mad_u32_u16": lambda a, b, c: a * b + c,
    "v_mad_i32_i16": lambda a, b, c: a * b + c,
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_xor3_b32": lambda a, b, c: a ^ b ^ c,
    "v_and_or_b32": lambda a, b, c: a & b | c,
    "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_lshl_add_u32": lambda a, b, c: (a << (b & 31)) + c,
    "v_lshl_add_u64": lambda a, b, c: (a << (b & 7)) + c,
    "v_add_lshl_u32": lambda a, b, c: (a + b) << (c & 31),
    "v_lshl_or_b32": lambda a, b, c: (a << (b & 31)) | c,
    "v_bfi_b32": lambda a, b, c: (a & b) | (~a & c),
    "v_bfe_u32": bit_field,
    "v_bfe_i32": lambda x, o, s: signed(bit_field(x, o, s), s & 31) if s & 31 else 0,
    "v_bfm_b32": lambda a, b: ((1 << (a & 31)) - 1) << (b & 31),
    "v_alignbit_b32": lambda a, b, c: (a << 32 | b) >> (c & 31),
    "v_alignbyte_b32": lambda a, b, c: (a << 32 | b) >> 8 * (c & 3),
    "v_perm_b32": perm,
    "v_sad_u8": sad8,
    "v_msad_u8": lambda a, b, c: sad8(a, b, c, masked=True),
    "v_sad_hi_u8": lambda a, b, c: (sad8(a, b) << 16) + c,
    "v_sad_u16": lambda a, b, c: c + abs((a & 65535) - (b & 65535)) + abs((a >> 16) - (b >> 16)),
    "v_sad_u32": lambda a, b, c: abs(a - b) + c,
    "v_lerp_u8": lambda a, b, c: sum(
        (byte_of(a, n) + byte_of(b, n) + (byte_of(c, n) & 1)) // 2 << 8 * n for n in range(4)
    ),
    "v_bfrev_b32": lambda a: int(f"{a:032b}"[::-1], 2),
    "v_bcnt_u32_b32": lambda a, b: f"{a:b}".count("1") + b,
    "v_prng_b32": lambda a: (a << 1) ^ (197 if a >> 31 else 0),
    "v_clz_i32_u32": lambda a: first_one(f"{a:032b}"),
    "v_ffbh_u32": lambda a: first_one(f"{a:032b}"),
    "v_ctz_i32_b32": lambda a: first_one(f"{a:032b}"[::-1]),
    "v_ffbl_b32": lambda a: first_one(f"{a:032b}"[::-1]),
    "v_cls_i32": leading_sign,
    "v_ffbh_i32": leading_sign,
    "v_ashr_pk_i8_i32": lambda a, b, c: sum(
        (max(-128, min(127, x >> (c & 31))) & 255) << 8 * n for n, x in enumerate((a, b))
    ),
    "v_ashr_pk_u8_i32": lambda a, b, c: sum(max(0, min(255, x >> (c & 31))) << 8 * n for n, x in enumerate((a, b))),
}
for size in (16, 32):
    ARITHMETIC |= {
        f"v_and_b{size}": operator.and_,
        f"v_or_b{size}": operator.or_,
        f"v_xor_b{size}": operator.xor,
        f"v_xnor_b{size}": lambda a, b: ~(a ^ b),
        f"v_not_b{size}": operator.invert,
    }
for size in (16, 32, 64):
    ARITHMETIC |= {
        f"v_lshlrev_b{size}": lambda s, x, m=size - 1: x << (s & m),
        f"v_lshrrev_b{size}": lambda s, x, m=size - 1: x >> (s & m),
        f"v_ashrrev_i{size}": lambda s, x, m=size - 1: x >> (s & m),
    }


def check_arithmetic(name: str, columns: list[list[int]], *, saturating: bool = False) -> None:
    vop = VALU[name]
    got = plain.run(vop, columns, saturating=saturating)
    for answer, row in zip(got, zip(*columns, strict=True), strict=True):
        sources = [value(bits, kind) for bits, kind in zip(row, vop.sources, strict=True)]
        exact = ARITHMETIC[name](*sources)
        wanted = clip(exact, vop.result) if saturating else exact
        assert answer == wanted & MASK[width(vop.result)], (name, [hex(x) for x in row])


@pytest.mark.parametrize("name", sorted(ARITHMETIC))
def test_integer_instruction_on_edges(name):
    sizes = [width(kind) for kind in VALU[name].sources]
    rows = list(itertools.product(*(EDGES[size] for size in sizes)))
    columns = [list(column) for column in zip(*rows[:: max(1, len(rows) // 600)], strict=True)]
    check_arithmetic(name, columns)
    if VALU[name].saturating:
        check_arithmetic(name, columns, saturating=True)


@EXAMPLES
@given(st.lists(st.tuples(*[st.integers(0, MASK[64])] * 3), min_size=4, max_size=12))
def test_integer_instructions_on_any_bits(rows):
    for name in ARITHMETIC:
        vop = VALU[name]
        columns = [[row[i] & MASK[width(kind)] for row in rows] for i, kind in enumerate(vop.sources)]
        check_arithmetic(name, columns)
        if vop.saturating:
            check_arithmetic(name, columns, saturating=True)


@EXAMPLES
@given(
    st.integers(0, MASK[32]),
    st.integers(0, MASK[32]),
    st.one_of(
        st.sampled_from([0x05040100, 0x07060302, 0x0C0D0E0F]),
        st.builds(lambda *codes: sum(code << 8 * n for n, code in enumerate(codes)), *[st.integers(0, 15)] * 4),
    ),
)
def test_byte_permutation_with_one_selector_for_all_lanes(high, low, select):
    lanes = [np.full((2, 32), bits, np.uint32) for bits in (high, low)]
    for shape in ((1, 1), (2, 1), (2, 32)):
        got = VALU["v_perm_b32"].function(*lanes, np.full(shape, select, np.uint32))
        assert got.shape == (2, 32)
        assert (got == perm(high, low, select)).all()


def test_byte_permutation_with_two_selectors_and_with_three():
    random = np.random.default_rng(5)
    high, low = random.integers(0, 1 << 32, (2, 2, 32), dtype=np.uint32)
    for selectors in ([0x05040100, 0x07060302], [0x05040100, 0x07060302, 0x0C0D0E0F]):
        select = random.choice(np.array(selectors, np.uint32), (2, 32))
        got = VALU["v_perm_b32"].function(high, low, select)
        wanted = [perm(*(int(x) for x in lane)) for lane in zip(high.flat, low.flat, select.flat, strict=True)]
        assert got.reshape(-1).tolist() == wanted


# --- carries ----------------------------------------------------------------------------------------------------------


def add(a, b, carry=0):
    total = a + b + carry
    return total & MASK[32], total > MASK[32]


def sub(a, b, borrow=0):
    return (a - b - borrow) & MASK[32], b + borrow > a


CARRY = {
    "v_add_co_u32": add,
    "v_add_co_ci_u32": add,
    "v_addc_co_u32": add,
    "v_sub_co_u32": sub,
    "v_sub_co_ci_u32": sub,
    "v_subb_co_u32": sub,
    "v_subrev_co_u32": lambda a, b, c=0: sub(b, a, c),
    "v_subrev_co_ci_u32": lambda a, b, c=0: sub(b, a, c),
    "v_subbrev_co_u32": lambda a, b, c=0: sub(b, a, c),
}
word = st.one_of(st.sampled_from(EDGES[32]), st.integers(0, MASK[32]))


@EXAMPLES
@given(st.lists(st.tuples(word, word, st.booleans()), min_size=1, max_size=32))
def test_carry_chains(rows):
    columns = [list(column) for column in zip(*rows, strict=True)]
    for name, exact in CARRY.items():
        with_carry = len(VALU[name].sources) == 3
        got = plain.run(VALU[name], columns)
        wanted = [exact(*(row if with_carry else row[:2])) for row in rows]
        assert got == wanted, name


long_word = st.one_of(st.sampled_from(EDGES[64]), st.integers(0, MASK[64]))


@EXAMPLES
@given(st.lists(st.tuples(word, word, long_word), min_size=1, max_size=32))
def test_wide_multiply_add(rows):
    columns = [list(column) for column in zip(*rows, strict=True)]
    for name in WIDE_MAD:
        got = plain.run(VALU[name], columns)
        for answer, (a, b, c) in zip(got, rows, strict=True):
            if "u64" in name:
                total = a * b + c
                assert answer == (total & MASK[64], bool(total >> 64)), name
            else:
                total = signed(a, 32) * signed(b, 32) + signed(c, 64)
                assert answer == (total & MASK[64], bool(total >> 64 & 1)), name


WIDE_MAD = ("v_mad_u64_u32", "v_mad_i64_i32", "v_mad_co_u64_u32", "v_mad_co_i64_i32")


# --- comparisons ------------------------------------------------------------------------------------------------------

RELATIONS = {
    "lt": operator.lt,
    "eq": operator.eq,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "f": lambda _a, _b: False,
    "t": lambda _a, _b: True,
    "ne": operator.ne,
}
FLOAT_RELATIONS = {name: RELATIONS[name] for name in ("lt", "eq", "le", "gt", "ge", "f", "t")} | {
    "tru": lambda _a, _b: True,
    "lg": lambda a, b: a < b or a > b,
    "o": lambda a, b: a == a and b == b,  # noqa: PLR0124
    "u": lambda a, b: a != a or b != b,  # noqa: PLR0124
    "nge": lambda a, b: not a >= b,
    "nlg": lambda a, b: not (a < b or a > b),
    "ngt": lambda a, b: not a > b,
    "nle": lambda a, b: not a <= b,
    "neq": lambda a, b: a != b,
    "nlt": lambda a, b: not a < b,
}
FLOAT_EDGES = {
    "f16": [0, 0x8000, 1, 0x3FF, 0x400, 0x3C00, 0xBC00, 0x7BFF, 0x7C00, 0xFC00, 0x7C01, 0x7E00, 0xFE00],
    "f32": [0, 1 << 31, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000],
    "f64": [
        0,
        1 << 63,
        1,
        1 << 52,
        0x3FF << 52,
        (0x7FF << 52) - 1,
        0x7FF << 52,
        0xFFF << 52,
        0x7FF8 << 48,
        0x7FF1 << 48,
    ],
}


@pytest.mark.parametrize("prefix", ["v_cmp", "v_cmpx"])
@pytest.mark.parametrize("kind", ["f16", "f32", "f64"])
def test_float_comparisons(prefix, kind):
    rows = list(itertools.product(FLOAT_EDGES[kind], repeat=2))
    columns = [list(column) for column in zip(*rows, strict=True)]
    for name, relation in FLOAT_RELATIONS.items():
        got = plain.run(VALU[f"{prefix}_{name}_{kind}"], columns)
        assert got == [relation(decode(a, kind), decode(b, kind)) for a, b in rows], name


@pytest.mark.parametrize("prefix", ["v_cmp", "v_cmpx"])
@pytest.mark.parametrize("kind", ["i16", "u16", "i32", "u32", "i64", "u64"])
def test_integer_comparisons(prefix, kind):
    rows = list(itertools.product(EDGES[width(kind)], repeat=2))
    columns = [list(column) for column in zip(*rows, strict=True)]
    for name, relation in RELATIONS.items():
        got = plain.run(VALU[f"{prefix}_{name}_{kind}"], columns)
        assert got == [relation(value(a, kind), value(b, kind)) for a, b in rows], name


def plain_class(bits: int, kind: str) -> int:
    exponent_bits, mantissa_bits = plain.FORMATS[kind]
    exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = bits & ((1 << mantissa_bits) - 1)
    negative = sign_of(bits, kind)
    if is_nan(bits, kind):
        return 0 if is_signalling(bits, kind) else 1
    if exponent == (1 << exponent_bits) - 1:
        return 2 if negative else 9
    if exponent:
        return 3 if negative else 8
    if mantissa:
        return 4 if negative else 7
    return 5 if negative else 6


@pytest.mark.parametrize("prefix", ["v_cmp", "v_cmpx"])
@pytest.mark.parametrize("kind", ["f16", "f32", "f64"])
def test_class_comparison(prefix, kind):
    rows = list(itertools.product(FLOAT_EDGES[kind], [1 << n for n in range(10)] + [0x3FF, 0x1F8, 3]))
    columns = [list(column) for column in zip(*rows, strict=True)]
    got = plain.run(VALU[f"{prefix}_class_{kind}"], columns)
    assert got == [bool(mask >> plain_class(bits, kind) & 1) for bits, mask in rows]


# --- moves, selections, lane counts -----------------------------------------------------------------------------------

MOVES = ("v_mov_b16", "v_mov_b32", "v_mov_b64")
SWAPS = ("v_swap_b32",)
SELECTIONS = ("v_cndmask_b16", "v_cndmask_b32")
LANE_COUNTS = ("v_mbcnt_lo_u32_b32", "v_mbcnt_hi_u32_b32")
BITOP3 = ("v_bitop3_b16", "v_bitop3_b32")


def test_moves_swaps_and_selections():
    for name in MOVES:
        edges = EDGES[width(VALU[name].sources[0])]
        assert plain.run(VALU[name], [edges]) == edges, name
    for name in SWAPS:
        edges = EDGES[width(VALU[name].sources[0])]
        assert plain.run(VALU[name], [edges, edges[::-1]]) == list(zip(edges, edges[::-1], strict=True)), name
    for name in SELECTIONS:
        edges = EDGES[width(VALU[name].sources[0])]
        mask = [bool(n % 3) for n in range(len(edges))]
        wanted = [b if m else a for a, b, m in zip(edges, edges[::-1], mask, strict=True)]
        assert plain.run(VALU[name], [edges, edges[::-1], mask]) == wanted, name


@EXAMPLES
@given(word, word)
def test_masked_bit_counts(mask, start):
    for lanes in (32, 64):
        numbers = np.arange(lanes, dtype=np.uint32)
        for name, base in zip(LANE_COUNTS, (0, 32), strict=True):
            got = VALU[name].function(np.array([[mask]], np.uint32), np.array([[start]], np.uint32), numbers)
            wanted = []
            for lane in range(lanes):
                below = ((1 << lane) - 1) >> base & MASK[32]
                wanted.append((start + f"{mask & below:b}".count("1")) & MASK[32])
            assert [int(x) for x in got[0]] == wanted, name


@EXAMPLES
@given(word, word, word, st.integers(0, 255))
def test_truth_tables(a, b, c, table):
    for name in BITOP3:
        size = width(VALU[name].result)
        wanted = 0
        for bit in range(size):
            row = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1
            wanted |= (table >> row & 1) << bit
        assert plain.run(VALU[name], [[a], [b], [c]], extra=(table,)) == [wanted], name


# --- the tables as wholes ---------------------------------------------------------------------------------------------


def test_every_instruction_is_checked():
    import test_convert
    import test_vector_float

    comparisons = {
        f"{prefix}_{name}_{kind}"
        for prefix in ("v_cmp", "v_cmpx")
        for names, kinds in (
            ((*FLOAT_RELATIONS, "class"), ("f16", "f32", "f64")),
            (RELATIONS, ("i16", "u16", "i32", "u32", "i64", "u64")),
        )
        for name in names
        for kind in kinds
    }
    checked = {*ARITHMETIC, *CARRY, *WIDE_MAD, *comparisons, *MOVES, *SWAPS, *SELECTIONS, *LANE_COUNTS, *BITOP3}
    checked |= test_vector_float.CHECKED | test_convert.CHECKED
    assert checked == set(VALU_OCP) == set(VALU_FNUZ)
    assert set(VALU) == checked - test_convert.EIGHT_BIT


def test_tables_differ_by_architecture():
    assert "v_cvt_f32_fp8" not in valu_for("gfx1100")
    assert valu_for("gfx942")["v_cvt_f32_fp8"].sources == ("fp8_fnuz",)
    assert valu_for("gfx950")["v_cvt_f32_fp8"].sources == valu_for("gfx1201")["v_cvt_f32_fp8"].sources == ("fp8",)


def test_only_gfx9_clears_the_other_half():
    assert zeroes_high_half("v_add_f16", "gfx942")
    assert not zeroes_high_half("v_fma_f16", "gfx942")
    assert not zeroes_high_half("v_cvt_pk_fp8_f32", "gfx942")
    assert not zeroes_high_half("v_add_f16", "gfx1100")
