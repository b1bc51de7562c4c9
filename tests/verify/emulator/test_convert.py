"""Register views, modifiers, sub-dword addressing and the conversion instructions against plain Python."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import plain
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import decode, encode, is_nan, sign_of, signed, width

from rocm_sd.verify.emulator import convert, float_formats
from rocm_sd.verify.emulator.vector import VALU, VALU_FNUZ, VALU_OCP

EXAMPLES = settings(max_examples=40, deadline=None, derandomize=True)
word = st.integers(0, (1 << 32) - 1)
half = st.integers(0, (1 << 16) - 1)
long_word = st.integers(0, (1 << 64) - 1)
FLOAT_EDGES = [
    0.0,
    -0.0,
    0.5,
    -0.5,
    1.5,
    2.5,
    -2.5,
    0.49999997,
    127.5,
    255.5,
    256.0,
    32767.5,
    32768.0,
    65535.5,
    65536.0,
]
FLOAT_EDGES += [-1.0, -32768.5, -32769.0, 2147483520.0, 2147483648.0, -2147483648.0, -2147483904.0, 4294967040.0]
FLOAT_EDGES += [4294967296.0, 1e30, -1e30, math.inf, -math.inf, math.nan, 65504.0, 65519.0, 65520.0, 6e-8, 2e-8, 1e-45]
float_value = st.one_of(
    st.sampled_from(FLOAT_EDGES), st.floats(width=32), st.floats(-70000, 70000, width=32), st.floats(-2, 2, width=32)
)


def array(*values: int, wide: bool = False) -> np.ndarray:
    return np.array([values], dtype=np.uint64 if wide else np.uint32)


# --- views ------------------------------------------------------------------------------------------------------------


@EXAMPLES
@given(word, word, st.booleans())
def test_sixteen_bit_values_come_from_and_go_to_the_named_half(bits, old, high):
    for kind in ("f16", "bf16", "u16", "i16", "b16"):
        typed = convert.to_type(array(bits), kind, high)
        part = bits >> 16 if high else bits & 0xFFFF
        if kind in ("f16", "bf16"):
            value = float(typed[0, 0])
            assert value == decode(part, kind) or (math.isnan(value) and is_nan(part, kind))
        else:
            assert int(typed[0, 0]) == (signed(part, 16) if kind == "i16" else part)
        back = int(convert.from_type(typed, kind, array(old), high)[0, 0])
        kept = old & (0xFFFF if high else 0xFFFF0000)
        shift = 16 if high else 0
        assert back & (0xFFFF if high else 0xFFFF0000) == kept
        if kind not in ("f16", "bf16") or not is_nan(part, kind):
            assert back == kept | part << shift
        alone = int(convert.from_type(typed, kind, None, high)[0, 0])
        assert alone & (0xFFFF if high else 0xFFFF0000) == 0


@EXAMPLES
@given(long_word)
def test_wide_and_packed_views_round_trip(bits):
    for kind in ("u64", "i64", "b64", "f64", "pk_b32", "pk_f32"):
        typed = convert.to_type(array(bits, wide=True), kind)
        assert int(convert.from_type(typed, kind)[0, 0]) == bits
    low, high = convert.split64(array(bits, wide=True))
    assert (int(low[0, 0]), int(high[0, 0])) == (bits & 0xFFFFFFFF, bits >> 32)
    assert int(convert.join64(low, high)[0, 0]) == bits
    register = bits & 0xFFFFFFFF
    for kind in ("u32", "i32", "b32", "f32", "pk_u16", "pk_i16", "pk_b16", "pk_f16"):
        typed = convert.to_type(array(register), kind)
        assert int(convert.from_type(typed, kind)[0, 0]) == register


@EXAMPLES
@given(word)
def test_small_integer_vectors(bits):
    for kind, size in (("u8x4", 8), ("i8x4", 8), ("u4x8", 4), ("i4x8", 4)):
        got = [int(x) for x in convert.to_type(array(bits), kind)[:, 0, 0]]
        fields = [bits >> shift & ((1 << size) - 1) for shift in range(0, 32, size)]
        assert got == ([signed(x, size) for x in fields] if kind[0] == "i" else fields)
    assert convert.signed_or_unsigned("iu8x4", signed=True) == "i8x4"
    assert convert.signed_or_unsigned("iu4x8", signed=False) == "u4x8"


def test_an_unknown_type_is_refused():
    with pytest.raises(KeyError):
        convert.to_type(array(0), "q31")
    with pytest.raises(KeyError):
        convert.from_type(array(0), "q31")


# --- modifiers --------------------------------------------------------------------------------------------------------


@EXAMPLES
@given(word, st.booleans(), st.booleans())
def test_modifiers_work_on_the_sign_bit(bits, absolute, negate):
    wanted = bits & 0x7FFFFFFF if absolute else bits
    wanted ^= 0x80000000 if negate else 0
    for kind in ("f32", "b32"):
        changed = convert.apply_modifiers(convert.to_type(array(bits), kind), absolute, negate)
        assert int(convert.from_type(changed, kind)[0, 0]) == wanted
    part = bits & 0xFFFF
    wanted = part & 0x7FFF if absolute else part
    wanted ^= 0x8000 if negate else 0
    changed = convert.apply_modifiers(convert.to_type(array(bits), "b16"), absolute, negate)
    assert int(changed[0, 0]) == wanted


@EXAMPLES
@given(word, st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_mixed_source_is_a_register_or_a_widened_half(bits, op_sel, op_sel_hi, absolute, negate):
    got = convert.mix_source(array(bits), op_sel=op_sel, op_sel_hi=op_sel_hi, absolute=absolute, negate=negate)
    part = bits >> 16 if op_sel else bits & 0xFFFF
    value = decode(part, "f16") if op_sel_hi else decode(bits, "f32")
    value = abs(value) if absolute else value
    value = -value if negate else value
    assert float(got[0, 0]) == value or (math.isnan(value) and np.isnan(got[0, 0]))


def test_clamp_and_output_modifier():
    values = np.array([[-2.0, -0.0, 0.25, 1.0, 3.0, np.inf, -np.inf, np.nan]], dtype=np.float32)
    assert convert.clamp(values).tolist() == [[0.0, 0.0, 0.25, 1.0, 1.0, 1.0, 0.0, 0.0]]
    for code, factor in ((0, 1.0), (1, 2.0), (2, 4.0), (3, 0.5)):
        assert convert.omod(values[:, :5], code).tolist() == [[x * factor for x in values[0, :5].tolist()]]
    assert convert.clamp(values.astype(np.float16)).dtype == np.float16


# --- sub-dword addressing ---------------------------------------------------------------------------------------------

FIELDS = {0: (0, 8), 1: (8, 8), 2: (16, 8), 3: (24, 8), 4: (0, 16), 5: (16, 16), 6: (0, 32)}


@EXAMPLES
@given(word, word)
def test_sdwa_reads_and_writes_fields(bits, old):
    for selection, (start, size) in FIELDS.items():
        field = bits >> start & ((1 << size) - 1)
        assert int(convert.sdwa_select(array(bits), selection)[0, 0]) == field
        extended = int(convert.sdwa_select(array(bits), selection, sign_extend=True)[0, 0])
        assert extended == signed(field, size) & 0xFFFFFFFF
        mask = ((1 << size) - 1) << start
        placed = bits << start & mask
        sign_filled = placed
        if bits >> (size - 1) & 1:
            sign_filled |= (0xFFFFFFFF << (start + size)) & 0xFFFFFFFF
        for unused, wanted in ((0, placed), (1, sign_filled), (2, old & ~mask | placed)):
            assert int(convert.sdwa_merge(array(bits), selection, unused, array(old))[0, 0]) == wanted


# --- narrow floats ----------------------------------------------------------------------------------------------------

BYTE_FORMATS = {"fp8": (4, 7), "bf8": (5, 15), "fp8_fnuz": (4, 8), "bf8_fnuz": (5, 16)}
IMPLEMENTED = {
    "fp8": float_formats.FP8,
    "bf8": float_formats.BF8,
    "fp8_fnuz": float_formats.FP8_FNUZ,
    "bf8_fnuz": float_formats.BF8_FNUZ,
}


def plain_byte_float(bits: int, kind: str) -> float:
    """OCP 8-bit floating point specification, and its "fnuz" relatives where 0x80 is the only special pattern."""
    exponent_bits, bias = BYTE_FORMATS[kind]
    mantissa_bits = 7 - exponent_bits
    exponent, mantissa = (bits & 0x7F) >> mantissa_bits, bits & ((1 << mantissa_bits) - 1)
    sign = -1 if bits & 0x80 else 1
    if kind.endswith("fnuz"):
        if bits == 0x80:
            return math.nan
    elif kind == "fp8" and bits & 0x7F == 0x7F:
        return math.nan
    elif kind == "bf8" and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits)


def plain_to_byte(value: float, kind: str, *, saturate: bool = False) -> int:
    """The nearest pattern by search, ties to the even pattern."""
    fnuz = kind.endswith("fnuz")
    if math.isnan(value):
        return 0x80 if fnuz else 0x7F
    finite = [p for p in range(128) if math.isfinite(plain_byte_float(p, kind))]
    largest = max(finite)
    sign = 0x80 if math.copysign(1, value) < 0 else 0
    if math.isinf(value):
        nearest = largest + 1
    else:
        exact = abs(Fraction(value))
        step = Fraction(plain_byte_float(largest, kind)) - Fraction(plain_byte_float(largest - 1, kind))
        points = {p: Fraction(plain_byte_float(p, kind)) for p in finite}
        points[largest + 1] = points[largest] + step
        nearest = min(points, key=lambda p: (abs(points[p] - exact), p & 1))
    if nearest > largest:
        if saturate:
            return sign | largest
        return 0x80 if fnuz else sign | (0x7F if kind == "fp8" else 0x7C)
    return 0 if fnuz and nearest == 0 else sign | nearest


@pytest.mark.parametrize("kind", sorted(BYTE_FORMATS))
def test_every_eight_bit_pattern_decodes(kind):
    got = IMPLEMENTED[kind].decode(np.arange(256)).tolist()
    for bits, value in enumerate(got):
        wanted = plain_byte_float(bits, kind)
        assert value == wanted or (math.isnan(value) and math.isnan(wanted)), bits
        if not math.isnan(wanted):
            assert math.copysign(1, value) == math.copysign(1, wanted)


@pytest.mark.parametrize("kind", sorted(BYTE_FORMATS))
@settings(max_examples=60, deadline=None, derandomize=True)
@given(value=st.one_of(st.floats(width=32), st.floats(-600, 600, width=32), st.sampled_from(FLOAT_EDGES)))
def test_eight_bit_rounding(kind, value):
    source = np.array([[value]], dtype=np.float32)
    for saturate in (False, True):
        got = int(IMPLEMENTED[kind].encode(source, saturate=saturate)[0, 0])
        assert got == plain_to_byte(float(source[0, 0]), kind, saturate=saturate)


@pytest.mark.parametrize("kind", sorted(BYTE_FORMATS))
def test_eight_bit_round_trip_and_midpoints(kind):
    patterns = [p for p in range(256) if math.isfinite(plain_byte_float(p, kind))]
    for p in patterns:
        value = np.array([[plain_byte_float(p, kind)]], dtype=np.float32)
        assert int(IMPLEMENTED[kind].encode(value)[0, 0]) == p
    for low, high in itertools.pairwise(patterns[:100]):
        middle = (plain_byte_float(low, kind) + plain_byte_float(high, kind)) / 2
        got = int(IMPLEMENTED[kind].encode(np.array([[middle]], dtype=np.float32))[0, 0])
        assert got == (low if low % 2 == 0 else high)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(word)
def test_bf16_and_xf32_rounding(bits):
    value = np.array([[bits]], dtype=np.uint32).view(np.float32)
    got = int(float_formats.float_to_bf16(value)[0, 0])
    if is_nan(bits, "f32"):
        assert is_nan(got, "bf16")
    else:
        assert got == encode(decode(bits, "f32"), "bf16", negative_zero=bool(sign_of(bits, "f32")))
    rounded = int(float_formats.round_to_xf32(value).view(np.uint32)[0, 0])
    assert rounded & 0x1FFF == 0 or not math.isfinite(decode(bits, "f32"))
    if math.isfinite(decode(bits, "f32")):
        steps = (bits & 0x7FFFFFFF) / 0x2000
        assert rounded & 0x7FFFFFFF == round(steps) * 0x2000


# --- conversion instructions ------------------------------------------------------------------------------------------


def to_integer(value: float, kind: str, how=math.trunc) -> int:
    size = width(kind)
    low, high = (-(1 << (size - 1)), (1 << (size - 1)) - 1) if kind[0] == "i" else (0, (1 << size) - 1)
    if math.isnan(value):
        return 0
    if math.isinf(value):
        return high if value > 0 else low
    return max(low, min(high, how(Fraction(value))))


def pair(low: int, high: int) -> int:
    return low & 0xFFFF | (high & 0xFFFF) << 16


def convert_float(source: str, target: str):
    return lambda a: encode(decode(a, source), target, negative_zero=bool(sign_of(a, source)))


def from_integer(source: str, target: str):
    size = width(source)
    return lambda a: encode(Fraction(signed(a, size) if source[0] == "i" else a), target)


STATEMENTS = {}
for a_kind, b_kind in (("f32", "f16"), ("f16", "f32"), ("f64", "f32"), ("f32", "f64")):
    STATEMENTS[f"v_cvt_{b_kind}_{a_kind}"] = convert_float(a_kind, b_kind)
for whole, floats in (("16", ("f16",)), ("32", ("f32", "f64"))):
    for s in "iu":
        for f in floats:
            STATEMENTS[f"v_cvt_{f}_{s}{whole}"] = from_integer(f"{s}{whole}", f)
            STATEMENTS[f"v_cvt_{s}{whole}_{f}"] = lambda a, k=f"{s}{whole}", f=f: to_integer(decode(a, f), k)
for n in range(4):
    STATEMENTS[f"v_cvt_f32_ubyte{n}"] = lambda a, n=n: encode(Fraction(a >> 8 * n & 255), "f32")
for n in ("v_cvt_floor_i32_f32", "v_cvt_flr_i32_f32"):
    STATEMENTS[n] = lambda a: to_integer(decode(a, "f32"), "i32", math.floor)
for n in ("v_cvt_nearest_i32_f32", "v_cvt_rpi_i32_f32"):
    STATEMENTS[n] = lambda a: to_integer(decode(a, "f32"), "i32", lambda x: math.floor(x + Fraction(1, 2)))
for n in ("v_cvt_pk_rtz_f16_f32", "v_cvt_pkrtz_f16_f32"):
    STATEMENTS[n] = lambda a, b: pair(*(encode(decode(x, "f32"), "f16", truncate=True) for x in (a, b)))
for k in ("i16", "u16"):
    STATEMENTS[f"v_cvt_pk_{k}_f32"] = lambda a, b, k=k: pair(*(to_integer(decode(x, "f32"), k) for x in (a, b)))
STATEMENTS |= {
    "v_cvt_i32_i16": lambda a: signed(a, 16),
    "v_cvt_u32_u16": lambda a: a,
    "v_cvt_f32_bf16": lambda a: a << 16,
    "v_cvt_off_f32_i4": lambda a: encode(Fraction(signed(a & 15, 4), 16), "f32"),
    "v_cvt_pk_i16_i32": lambda a, b: pair(*(max(-32768, min(32767, signed(x, 32))) for x in (a, b))),
    "v_cvt_pk_u16_u32": lambda a, b: pair(*(min(65535, x) for x in (a, b))),
    "v_cvt_pk_f16_f32": lambda a, b: pair(*(encode(decode(x, "f32"), "f16") for x in (a, b))),
    "v_cvt_pk_bf16_f32": lambda a, b: pair(*(encode(decode(x, "f32"), "bf16") for x in (a, b))),
    "v_sat_pk_u8_i16": lambda a: sum(max(0, min(255, signed(a >> 16 * i, 16))) << 8 * i for i in range(2)),
    "v_pack_b32_f16": pair,
}


def patterns(kind: str) -> st.SearchStrategy[int]:
    if kind == "f32":
        return st.one_of(word, float_value.map(lambda x: encode(float(np.float32(x)), "f32")))
    if kind == "f64":
        return st.one_of(long_word, float_value.map(lambda x: encode(x, "f64")))
    if kind == "f16":
        return st.one_of(half, float_value.map(lambda x: encode(float(np.float32(x)), "f16")))
    return half if kind in ("u16", "i16", "b16", "bf16") else word


def same_pattern(got: int, wanted: int, name: str) -> bool:
    result = VALU[name].result
    if result in plain.FORMATS:
        return got == wanted or (is_nan(got, result) and is_nan(wanted, result))
    packed = {"v_cvt_pk_f16_f32": "f16", "v_cvt_pk_bf16_f32": "bf16", "rtz": "f16"}
    kind = next((k for n, k in packed.items() if n in name), None) if "bf8" not in name else None
    if "rtz" in name:
        kind = "f16"
    if kind is None:
        return got == wanted & ((1 << width(result)) - 1)
    halves = [(x & 0xFFFF, x >> 16) for x in (got, wanted)]
    return all(g == w or (is_nan(g, kind) and is_nan(w, kind)) for g, w in zip(*halves, strict=True))


@pytest.mark.parametrize("name", sorted(STATEMENTS))
@EXAMPLES
@given(data=st.data())
def test_conversion_instruction(name, data):
    vop = VALU[name]
    rows = data.draw(st.lists(st.tuples(*[patterns(kind) for kind in vop.sources]), min_size=1, max_size=12))
    got = plain.run(vop, [list(column) for column in zip(*rows, strict=True)])
    for answer, row in zip(got, rows, strict=True):
        wanted = STATEMENTS[name](*row)
        assert same_pattern(answer, wanted, name), (name, [hex(x) for x in row], hex(answer), hex(wanted))


EIGHT_BIT = {
    name.format(kind)
    for kind in ("fp8", "bf8")
    for name in ("v_cvt_f32_{}", "v_cvt_pk_f32_{}", "v_cvt_pk_{}_f32", "v_cvt_sr_{}_f32")
}


@pytest.mark.parametrize(("table", "suffix"), [(VALU_OCP, ""), (VALU_FNUZ, "_fnuz")], ids=["ocp", "fnuz"])
@pytest.mark.parametrize("short", ["fp8", "bf8"])
@EXAMPLES
@given(bits=word, old=word, values=st.tuples(float_value, float_value))
def test_eight_bit_conversion_instructions(table, suffix, short, bits, old, values):
    kind = short + suffix
    assert table[f"v_cvt_f32_{short}"].sources == (kind,)
    for byte in range(4):
        typed = convert.to_type(array(bits), kind, byte=byte)
        got = float(table[f"v_cvt_f32_{short}"].function(typed)[0, 0])
        wanted = plain_byte_float(bits >> 8 * byte & 255, kind)
        assert got == wanted or (math.isnan(got) and math.isnan(wanted))
    for high in (False, True):
        typed = convert.to_type(array(bits), f"{kind}x2", high)
        got = [float(x) for x in table[f"v_cvt_pk_f32_{short}"].function(typed)[:, 0, 0]]
        part = bits >> 16 if high else bits
        wanted = [plain_byte_float(part >> 8 * i & 255, kind) for i in range(2)]
        assert all(g == w or (math.isnan(g) and math.isnan(w)) for g, w in zip(got, wanted, strict=True))
    sources = [np.array([[x]], dtype=np.float32) for x in values]
    with np.errstate(all="ignore"):
        packed = int(table[f"v_cvt_pk_{short}_f32"].function(*sources)[0, 0])
    wanted = [plain_to_byte(float(x[0, 0]), kind) for x in sources]
    assert packed == wanted[0] | wanted[1] << 8
    random = np.zeros((1, 1), dtype=np.uint32)
    rounded = table[f"v_cvt_sr_{short}_f32"].function(sources[0], random)
    for byte in range(4):
        stored = int(convert.from_type(rounded, kind, array(old), byte=byte)[0, 0])
        assert stored == old & ~(255 << 8 * byte) | wanted[0] << 8 * byte


@EXAMPLES
@given(st.integers(0x30000000, 0x43000000), word)
def test_stochastic_rounding_adds_into_the_dropped_bits(bits, random):
    for kind, dropped in (("fp8", 20), ("bf8", 21)):
        value = np.array([[bits]], dtype=np.uint32)
        got = VALU_OCP[f"v_cvt_sr_{kind}_f32"].function(value.view(np.float32), array(random))
        mantissa = ((bits & 0x7FFFFF) + (random >> (32 - dropped))) & 0x7FFFFF
        assert int(got[0, 0]) == plain_to_byte(decode(bits & 0xFF800000 | mantissa, "f32"), kind)


CHECKED = {*STATEMENTS, *EIGHT_BIT}
