"""Matrix instructions against loops that fetch single elements by the layout formulas of AMD's ISA documents."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import numpy as np
import pytest
from plain import decode, encode, signed, ulps_apart
from test_convert import plain_byte_float

from rocm_sd.verify.emulator.matrix import MATRIX, MatrixModifiers

WAVES = 2
BITS = {"f16": 16, "bf16": 16, "f32": 32, "xf32": 32, "f64": 64, "i8": 8, "iu8": 8, "iu4": 4, "fp8": 8, "bf8": 8}
NAME = re.compile(
    r"v_(?P<unit>wmma|mfma)_(?P<d>f32|f64|f16|bf16|i32)_(?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)(?:_(?P<blocks>\d+)b)?_"
    r"(?P<a>[a-z]+\d+)(?:_(?P<b>[a-z]+\d+))?$"
)


class Shape:
    def __init__(self, family: str, name: str) -> None:
        found = NAME.match(name)
        self.family, self.unit, self.d, self.a = family, found["unit"], found["d"], found["a"]
        self.b = found["b"] or self.a
        self.m, self.n, self.k = (int(found[x]) for x in "mnk")
        self.blocks = int(found["blocks"] or 1)
        self.lanes = 32 if self.unit == "wmma" else 64


def canonical(table) -> list[str]:
    """One name for each instruction: the one that says how many blocks it has."""
    chosen = {}
    for name, op in table.items():
        if NAME.match(name) and (id(op) not in chosen or "b_" in name.split("x")[-1]):
            chosen[id(op)] = name
    return sorted(chosen.values())


CASES = [(family, name) for family, table in MATRIX.items() for name in canonical(table)]


# --- where an element stands: (element within the lane's registers, lane) ---------------------------------------------


def place_of_input(shape: Shape, block: int, row: int, k: int) -> tuple[int, int]:
    if shape.family == "gfx11":
        # RDNA3 ISA 7.9: lane l holds row l % 16 in full, lanes 16..31 being a copy.
        return k, row
    if shape.family == "gfx12":
        # RDNA4 ISA 7.12: lanes 0..15 hold the first half of K, lanes 16..31 the second.
        half = shape.k // 2
        return k % half, row + 16 * (k // half)
    # CDNA3 ISA 7.1: i varies fastest over lanes, then the block, then groups of consecutive k.
    groups = 64 // (shape.m * shape.blocks)
    each = shape.k // groups
    return k % each, row + shape.m * block + shape.m * shape.blocks * (k // each)


def place_of_output(shape: Shape, block: int, row: int, column: int) -> tuple[int, int]:
    if shape.family == "gfx11":
        return row // 2, column + 16 * (row & 1)
    if shape.family == "gfx12":
        return row & 7, column + 16 * (row >> 3)
    if shape.d == "f64":
        return (row // 4, column + 16 * (row % 4)) if shape.m == 16 else (0, column + 4 * block + 16 * row)
    if shape.m == 4:
        return row, column + 4 * block
    if shape.m == 16:
        return row % 4 + 4 * block, column + 16 * (row // 4)
    return row % 4 + 4 * (row // 8) + 16 * block, column + 32 * (row // 4 % 2)


def field(registers: np.ndarray, wave: int, element: int, lane: int, bits: int) -> int:
    if bits == 64:
        return int(registers[2 * element, wave, lane]) | int(registers[2 * element + 1, wave, lane]) << 32
    per_register = 32 // bits
    word = int(registers[element // per_register, wave, lane])
    return word >> bits * (element % per_register) & ((1 << bits) - 1)


def read(kind: str, pattern: int, family: str, is_signed: bool):
    if kind in ("i8", "iu8", "iu4"):
        return signed(pattern, BITS[kind]) if is_signed else pattern
    if kind in ("fp8", "bf8"):
        return plain_byte_float(pattern, kind + ("_fnuz" if family == "gfx94x" else ""))
    if kind == "xf32":
        steps = round(Fraction(pattern & 0x7FFFFFFF, 1 << 13))
        return decode(pattern & 1 << 31 | steps << 13, "f32")
    return decode(pattern, kind)


def random_registers(rng, kind: str, count: int, lanes: int, family: str) -> np.ndarray:
    """Values near one, small integers among them, so that sums are neither exact nor swamped by one term."""
    shape = (count, WAVES, lanes)
    if kind in ("i8", "iu8", "iu4", "i32"):
        return rng.integers(0, 1 << 32, shape, dtype=np.uint32)
    if kind in ("fp8", "bf8"):
        words = rng.integers(0, 1 << 32, shape, dtype=np.uint32)
        return words & np.uint32(0xBFBFBFBF) | np.uint32(0x01010101)  # no infinity, no NaN of either kind
    if kind == "f64":
        pairs = rng.normal(size=(count // 2, WAVES, lanes)).view(np.uint64)
        low_high = np.stack([pairs & np.uint64(0xFFFFFFFF), pairs >> np.uint64(32)], axis=1)
        return low_high.astype(np.uint32).reshape(shape)
    if kind in ("f32", "xf32"):
        return rng.normal(size=shape).astype(np.float32).view(np.uint32)
    halves = rng.normal(size=(*shape, 2))
    if kind == "f16":
        return halves.astype(np.float16).view(np.uint32)[..., 0]
    bits = halves.astype(np.float32).view(np.uint32) >> np.uint32(16)
    return bits[..., 0] | bits[..., 1] << np.uint32(16)


def operands(family: str, name: str, seed: int = 0):
    op, shape = MATRIX[family][name], Shape(family, name)
    rng = np.random.default_rng([seed, *name.encode()])
    a = random_registers(rng, shape.a, op.a_regs, shape.lanes, family)
    b = random_registers(rng, shape.b, op.b_regs, shape.lanes, family)
    c = random_registers(rng, shape.d, op.d_regs, shape.lanes, family)
    if family == "gfx11":
        a[..., 16:], b[..., 16:] = a[..., :16], b[..., :16]
    return op, shape, a, b, c


def expected(shape: Shape, a, b, c, wave: int, block: int, row: int, column: int, *, a_signed, b_signed, high=False):
    terms = []
    for k in range(shape.k):
        x = read(shape.a, field(a, wave, *place_of_input(shape, block, row, k), BITS[shape.a]), shape.family, a_signed)
        y = read(
            shape.b, field(b, wave, *place_of_input(shape, block, column, k), BITS[shape.b]), shape.family, b_signed
        )
        terms.append((x, y))
    element, lane = place_of_output(shape, block, row, column)
    pattern = output_pattern(shape, c, wave, element, lane, high)
    start = signed(pattern, 32) if shape.d == "i32" else decode(pattern, shape.d)
    return start, terms


def output_pattern(shape: Shape, registers, wave: int, element: int, lane: int, high: bool) -> int:
    bits = 32 if shape.d == "i32" else BITS[shape.d]
    if shape.family == "gfx11" and bits == 16:
        return int(registers[element, wave, lane]) >> (16 if high else 0) & 0xFFFF
    return field(registers, wave, element, lane, bits)


def positions(shape: Shape, step: int = 1):
    everything = [
        (w, z, r, c) for w in range(WAVES) for z in range(shape.blocks) for r in range(shape.m) for c in range(shape.n)
    ]
    return everything[::step]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_matrix_instruction(family, name):
    op, shape, a, b, c = operands(family, name)
    is_signed = shape.a == "i8"
    d = op(a, b, c)
    assert d.shape == (op.d_regs, WAVES, shape.lanes)
    assert op.flops == 2 * shape.m * shape.n * shape.k * shape.blocks
    # 37 is prime to every shape, so rows, columns, blocks and waves are all visited.
    for wave, block, row, column in positions(shape, 37 if shape.m > 4 else 5):
        start, terms = expected(shape, a, b, c, wave, block, row, column, a_signed=is_signed, b_signed=is_signed)
        element, lane = place_of_output(shape, block, row, column)
        got = output_pattern(shape, d, wave, element, lane, high=False)
        if shape.d == "i32":
            assert got == (start + sum(x * y for x, y in terms)) & 0xFFFFFFFF
            continue
        exact = Fraction(start) + sum(Fraction(x) * Fraction(y) for x, y in terms)
        wanted = encode(exact, shape.d)
        # float64 sums of exact products: a tie of the last rounding may fall the other way, no more.
        assert ulps_apart(got, wanted, shape.d) <= (8 if shape.d == "f64" else 1), (row, column, block)


@pytest.mark.parametrize(
    ("family", "name"), [case for case in CASES if "x16x16_f16" in case[1] or "32x32x8_f16" in case[1]]
)
def test_every_element_lands_in_its_place(family, name):
    """Powers of two and distinct integers: any exchanged row, column or k shows as another number."""
    op, shape = MATRIX[family][name], Shape(family, name)
    rng = np.random.default_rng(7)
    left, right = rng.integers(-3, 4, (shape.m, shape.k)), rng.integers(-3, 4, (shape.k, shape.n))
    start = np.arange(shape.m * shape.n).reshape(shape.m, shape.n) % 251
    a, b = (np.zeros((count, 1, shape.lanes), np.uint32) for count in (op.a_regs, op.b_regs))
    c = np.zeros((op.d_regs, 1, shape.lanes), np.uint32)
    for k in range(shape.k):
        for registers, values in ((a, left[:, k]), (b, right[k])):
            for index, value in enumerate(values):
                element, lane = place_of_input(shape, 0, index, k)
                pattern = np.uint32(encode(float(value), "f16") << 16 * (element % 2))
                registers[element // 2, 0, lane] |= pattern
                if family == "gfx11":
                    registers[element // 2, 0, lane + 16] |= pattern
    sixteen = shape.d != "f32"
    for row in range(shape.m):
        for column in range(shape.n):
            element, lane = place_of_output(shape, 0, row, column)
            pattern = encode(float(start[row, column]), shape.d)
            if sixteen and family == "gfx12":
                c[element // 2, 0, lane] |= np.uint32(pattern << 16 * (element % 2))
            else:
                c[element, 0, lane] = pattern
    d = op(a, b, c)
    product = left @ right + start
    for row in range(shape.m):
        for column in range(shape.n):
            element, lane = place_of_output(shape, 0, row, column)
            got = decode(output_pattern(shape, d, 0, element, lane, high=False), shape.d)
            assert got == product[row, column], (row, column)


@pytest.mark.parametrize("family", ["gfx11", "gfx12"])
@pytest.mark.parametrize("kind", ["iu8", "iu4"])
def test_integer_wmma_takes_signs_from_neg_lo_and_saturates(family, kind):
    name = f"v_wmma_i32_16x16x16_{kind}"
    op, shape, a, b, c = operands(family, name, seed=3)
    c[:] = np.where(c & 1, np.uint32(0x7FFFFFF0), np.uint32(0x80000010))
    for a_signed in (False, True):
        for b_signed in (False, True):
            for clamp in (False, True):
                d = op(a, b, c, MatrixModifiers(neg_lo=(a_signed, b_signed, False), clamp=clamp))
                for wave, block, row, column in positions(shape, 41):
                    start, terms = expected(
                        shape, a, b, c, wave, block, row, column, a_signed=a_signed, b_signed=b_signed
                    )
                    total = start + sum(x * y for x, y in terms)
                    if clamp:
                        total = max(-(1 << 31), min((1 << 31) - 1, total))
                    got = output_pattern(shape, d, wave, *place_of_output(shape, block, row, column), high=False)
                    assert got == total & 0xFFFFFFFF


@pytest.mark.parametrize("family", ["gfx11", "gfx12"])
def test_float_wmma_negates_even_and_odd_elements(family):
    op, shape, a, b, c = operands(family, "v_wmma_f32_16x16x16_f16", seed=4)
    modifiers = MatrixModifiers(neg_lo=(True, False, True), neg_hi=(False, True, True))
    d = op(a, b, c, modifiers)
    for wave, block, row, column in positions(shape, 29):
        start, terms = expected(shape, a, b, c, wave, block, row, column, a_signed=False, b_signed=False)
        exact = -Fraction(abs(start))
        for k, (x, y) in enumerate(terms):
            sign = (-1 if k % 2 == 0 else 1) * (-1 if k % 2 == 1 else 1)
            exact += sign * Fraction(x) * Fraction(y)
        got = output_pattern(shape, d, wave, *place_of_output(shape, block, row, column), high=False)
        assert ulps_apart(got, encode(exact, "f32"), "f32") <= 1


@pytest.mark.parametrize("name", ["v_wmma_f16_16x16x16_f16", "v_wmma_bf16_16x16x16_bf16"])
def test_gfx11_half_results_fill_one_half_and_keep_the_other(name):
    op, shape, a, b, c = operands("gfx11", name, seed=5)
    for high in (False, True):
        d = op(a, b, c, MatrixModifiers(op_sel=(False, False, high)))
        kept = np.uint32(0xFFFF if high else 0xFFFF0000)
        assert ((d & kept) == (c & kept)).all()
        for wave, block, row, column in positions(shape, 31):
            start, terms = expected(shape, a, b, c, wave, block, row, column, a_signed=False, b_signed=False, high=high)
            exact = Fraction(start) + sum(Fraction(x) * Fraction(y) for x, y in terms)
            got = output_pattern(shape, d, wave, *place_of_output(shape, block, row, column), high=high)
            assert ulps_apart(got, encode(exact, shape.d), shape.d) <= 1


def test_gfx11_operands_that_are_not_repeated_are_refused():
    op, _, a, b, c = operands("gfx11", "v_wmma_f32_16x16x16_f16")
    b[0, 0, 20] ^= np.uint32(1)
    with pytest.raises(ValueError, match="lanes 16 to 31 of B"):
        op(a, b, c)


def test_block_permutations_are_refused():
    op, _, a, b, c = operands("gfx94x", "v_mfma_f32_32x32x4_2b_f16")
    for field_name in ("cbsz", "abid", "blgp"):
        with pytest.raises(ValueError, match="not modelled"):
            op(a, b, c, MatrixModifiers(**{field_name: 1}))


def test_subnormals_survive_on_gfx94x_and_vanish_on_gfx90a():
    tiny = np.full((2, 1, 64), 0x00010001, np.uint32)  # 2**-24, a float16 subnormal
    one = np.full((2, 1, 64), 0x3C003C00, np.uint32)
    c = np.zeros((4, 1, 64), np.uint32)
    kept = MATRIX["gfx94x"]["v_mfma_f32_16x16x16_f16"](tiny, one, c).view(np.float32)
    flushed = MATRIX["gfx90a"]["v_mfma_f32_16x16x16f16"](tiny, one, c).view(np.float32)
    assert (kept == 16 * 2.0**-24).all()
    assert (flushed == 0).all()


def test_special_values_pass_through():
    a = np.full((8, 1, 32), 0x3C003C00, np.uint32)
    c = np.full((8, 1, 32), encode(math.inf, "f32"), np.uint32)
    op = MATRIX["gfx11"]["v_wmma_f32_16x16x16_f16"]
    assert np.isposinf(op(a, a, c).view(np.float32)).all()
    nan = np.full((8, 1, 32), 0x7E007E00, np.uint32)
    with np.errstate(all="ignore"):
        assert np.isnan(op(nan, a, c).view(np.float32)).all()


def test_each_instruction_answers_to_the_names_of_the_assembler():
    table = MATRIX["gfx94x"]
    for name in (
        "v_mfma_f32_32x32x8_f16",
        "v_mfma_f32_16x16x16_bf16",
        "v_mfma_f32_4x4x4_16b_f16",
        "v_mfma_i32_32x32x16_i8",
    ):
        assert name in table
    assert table["v_mfma_f32_4x4x4_16b_f16"] is table["v_mfma_f32_4x4x4f16"]
    assert MATRIX["gfx90a"]["v_mfma_f32_32x32x8bf16_1k"] is MATRIX["gfx90a"]["v_mfma_f32_32x32x8_bf16"]
