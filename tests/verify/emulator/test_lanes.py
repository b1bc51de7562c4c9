"""Cross-lane movement against plain loops over lanes, written from AMD's pseudocode."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_sd.verify.emulator import lanes

EXAMPLES = settings(max_examples=25, deadline=None, derandomize=True)
word = st.integers(0, (1 << 32) - 1)


@st.composite
def waves(draw, sizes=(32, 64)):
    """Registers and exec of two waves: all lanes active, none, or any of them."""
    size = draw(st.sampled_from(sizes))
    generator = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    registers = generator.integers(0, 1 << 32, (2, size), dtype=np.uint32)
    density = draw(st.sampled_from([0.0, 0.5, 1.0]))
    return registers, generator.random((2, size)) < density


# --- DPP --------------------------------------------------------------------------------------------------------------

# Each control as the documents write it: pix[n] takes the value of the lane given, None where it lies outside.
DPP = {
    **{
        f"quad_perm:{p:#04x}": (p, lambda n, _l, p=p: (n & ~3) + (p >> 2 * (n % 4) & 3))
        for p in (0xE4, 0xB1, 0x4E, 0, 0x1B)
    },
    **{f"row_shl:{k}": (0x100 + k, lambda n, _l, k=k: n + k if n % 16 < 16 - k else None) for k in (1, 4, 15)},
    **{f"row_shr:{k}": (0x110 + k, lambda n, _l, k=k: n - k if n % 16 >= k else None) for k in (1, 8, 15)},
    **{f"row_ror:{k}": (0x120 + k, lambda n, _l, k=k: n - k if n % 16 >= k else n - k + 16) for k in (1, 7, 15)},
    "wave_shl:1": (0x130, lambda n, size: n + 1 if n < size - 1 else None),
    "wave_rol:1": (0x134, lambda n, size: n + 1 if n < size - 1 else 0),
    "wave_shr:1": (0x138, lambda n, _size: n - 1 if n > 0 else None),
    "wave_ror:1": (0x13C, lambda n, size: n - 1 if n > 0 else size - 1),
    "row_mirror": (0x140, lambda n, _l: n // 16 * 16 + 15 - n % 16),
    "row_half_mirror": (0x141, lambda n, _l: n // 8 * 8 + 7 - n % 8),
    "row_bcast:15": (0x142, lambda n, _l: n // 16 * 16 - 1 if n > 15 else None),
    "row_bcast:31": (0x143, lambda n, _l: n // 32 * 32 - 1 if n > 31 else None),
    **{f"row_share:{k}": (0x150 + k, lambda n, _l, k=k: n // 16 * 16 + k) for k in (0, 3, 15)},
    **{f"row_xmask:{k}": (0x160 + k, lambda n, _l, k=k: n // 16 * 16 + (n % 16 ^ k)) for k in (1, 5, 8, 15)},
}


def expected_dpp(registers, active, source_of, row_mask, bank_mask, bound_control, fetch_inactive):
    size = registers.shape[1]
    values, written = np.zeros_like(registers), np.zeros(registers.shape, dtype=bool)
    for wave in range(len(registers)):
        for n in range(size):
            if not (row_mask >> n // 16 & 1 and bank_mask >> n % 16 // 4 & 1):
                continue
            source = source_of(n, size)
            if source is not None and (fetch_inactive or active[wave, source]):
                values[wave, n], written[wave, n] = registers[wave, source], True
            elif bound_control:
                values[wave, n], written[wave, n] = 0, True
    return values, written


@pytest.mark.parametrize("control", DPP)
@EXAMPLES
@given(data=waves(), row_mask=st.integers(0, 15), bank_mask=st.integers(0, 15), flags=st.tuples(*[st.booleans()] * 3))
def test_dpp(control, data, row_mask, bank_mask, flags):
    registers, active = data
    code, source_of = DPP[control]
    masked, bound_control, fetch_inactive = flags
    row_mask, bank_mask = (row_mask, bank_mask) if masked else (15, 15)
    wanted, written = expected_dpp(registers, active, source_of, row_mask, bank_mask, bound_control, fetch_inactive)
    got, found = lanes.dpp(
        registers,
        code,
        active,
        row_mask=row_mask,
        bank_mask=bank_mask,
        bound_control=bound_control,
        fetch_inactive=fetch_inactive,
    )
    assert (found == written).all()
    assert (got[written] == wanted[written]).all()


def test_a_reserved_dpp_control_is_refused():
    registers, active = np.zeros((1, 32), dtype=np.uint32), np.ones((1, 32), dtype=bool)
    for control in (0x100, 0x110, 0x131, 0x144, 0x170):
        with pytest.raises(ValueError, match="names no lane pattern"):
            lanes.dpp(registers, control, active)


@EXAMPLES
@given(data=waves(), selects=st.integers(0, (1 << 24) - 1), fetch_inactive=st.booleans())
def test_dpp8(data, selects, fetch_inactive):
    registers, active = data
    got, found = lanes.dpp8(registers, selects, active, fetch_inactive=fetch_inactive)
    assert found.all()
    for wave in range(2):
        for n in range(registers.shape[1]):
            source = n // 8 * 8 + (selects >> 3 * (n % 8) & 7)
            valid = fetch_inactive or active[wave, source]
            assert got[wave, n] == (registers[wave, source] if valid else 0)


# --- permutes within rows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cross", [False, True], ids=["permlane16", "permlanex16"])
@EXAMPLES
@given(data=waves(), low=word, high=word, flags=st.tuples(st.booleans(), st.booleans()))
def test_permlane16(cross, data, low, high, flags):
    registers, active = data
    bound_control, fetch_inactive = flags
    select = low | high << 32
    options = {"cross": cross, "bound_control": bound_control, "fetch_inactive": fetch_inactive}
    scalars = (np.full((2, 1), low, np.uint32), np.full((2, 1), high, np.uint32))
    fixed = lanes.permlane16(registers, *scalars, active, **options)
    own = np.array([[select >> 4 * (n % 16) & 15 | 0xABC0 for n in range(registers.shape[1])]] * 2, dtype=np.uint32)
    variable = lanes.permlane16_var(registers, own, active, **options)
    for values, found in (fixed, variable):
        for wave in range(2):
            for n in range(registers.shape[1]):
                row = n // 16 ^ (1 if cross else 0)
                source = row * 16 + (select >> 4 * (n % 16) & 15)
                if fetch_inactive or active[wave, source]:
                    assert found[wave, n]
                    assert values[wave, n] == registers[wave, source]
                else:
                    assert found[wave, n] == bound_control
                    assert not bound_control or values[wave, n] == 0


@EXAMPLES
@given(data=waves(sizes=(64,)))
def test_wave64_permutes_and_swaps(data):
    registers, _ = data
    other = registers[::-1] ^ np.uint32(0x5A5A5A5A)
    swapped = lanes.permlane64(registers)
    pair32, pair16 = (lanes.permlane_swap(registers, other, rows) for rows in (32, 16))
    for n in range(64):
        assert (swapped[:, n] == registers[:, n ^ 32]).all()
        assert (pair32[0][:, n] == (registers[:, n] if n < 32 else other[:, n - 32])).all()
        assert (pair32[1][:, n] == (registers[:, n + 32] if n < 32 else other[:, n])).all()
        odd_row = n // 16 % 2
        assert (pair16[0][:, n] == (other[:, n - 16] if odd_row else registers[:, n])).all()
        assert (pair16[1][:, n] == (other[:, n] if odd_row else registers[:, n + 16])).all()


def test_permlane64_does_nothing_to_a_wave_of_32():
    registers = np.arange(32, dtype=np.uint32)[None]
    assert (lanes.permlane64(registers) == registers).all()


# --- single lanes -----------------------------------------------------------------------------------------------------


@EXAMPLES
@given(data=waves(), lane=st.tuples(word, word), value=st.tuples(word, word))
def test_read_and_write_one_lane(data, lane, value):
    registers, active = data
    size = registers.shape[1]
    numbers, values = np.array(lane, dtype=np.uint32), np.array(value, dtype=np.uint32)
    got = lanes.read_lane(registers, numbers)
    written = lanes.write_lane(registers, values, numbers)
    first = lanes.read_first_lane(registers, active)
    for wave in range(2):
        assert got[wave] == registers[wave, lane[wave] % size]
        wanted = registers[wave].tolist()
        wanted[lane[wave] % size] = value[wave]
        assert written[wave].tolist() == wanted
        lowest = next((n for n in range(size) if active[wave, n]), 0)
        assert first[wave] == registers[wave, lowest]


# --- through the data share -------------------------------------------------------------------------------------------


@EXAMPLES
@given(data=waves(), seed=st.integers(0, 1 << 20), offset=st.sampled_from([0, 4, 64, 252]))
def test_ds_permutes(data, seed, offset):
    registers, active = data
    size = registers.shape[1]
    address = np.random.default_rng(seed).integers(0, 1 << 32, registers.shape, dtype=np.uint32)
    for group in (None, 32):
        pulled = lanes.ds_bpermute(address, registers, active, offset=offset, group=group)
        pushed = lanes.ds_permute(address, registers, active, offset=offset, group=group)
        for wave in range(2):
            arrived = [0] * size
            for n in range(size):
                lane = ((int(address[wave, n]) + offset) & 0xFFFFFFFF) // 4 % (group or size)
                assert pulled[wave, n] == (registers[wave, lane] if active[wave, lane] else 0)
                if active[wave, n]:
                    arrived[lane] = int(registers[wave, n])
            assert pushed[wave].tolist() == arrived


def reversed_bits(n: int) -> int:
    return sum((n >> i & 1) << 4 - i for i in range(5))


def swizzle_source(offset: int, n: int) -> int:
    if offset >= 0xE000:
        mask = offset & 31
        return reversed_bits(n & 31) >> (mask).bit_count() | n & mask | n & 32
    if offset >= 0xC000:
        mask, rotate = offset & 31, offset >> 5 & 31
        rotate = -rotate if offset >> 10 & 1 else rotate
        return n & mask | (n + rotate) & ~mask & 31 | n & 32
    if offset & 0x8000:
        return n & ~3 | offset >> 2 * (n & 3) & 3
    return n & 32 | ((n & offset & 31) | offset >> 5 & 31) ^ offset >> 10 & 31


@EXAMPLES
@given(
    data=waves(),
    offset=st.one_of(
        st.integers(0, 0x7FFF),
        st.integers(0x8000, 0x80FF),
        st.builds(
            lambda mask, amount, way: 0xC000 | way << 10 | amount << 5 | mask,
            *[st.integers(0, 31)] * 2,
            st.integers(0, 1),
        ),
        st.sampled_from([0xE000, 0xE010, 0xE01F]),
    ),
)
def test_ds_swizzle(data, offset):
    registers, active = data
    got = lanes.ds_swizzle(registers, offset, active)
    for wave in range(2):
        for n in range(registers.shape[1]):
            source = swizzle_source(offset, n)
            assert got[wave, n] == (registers[wave, source] if active[wave, source] else 0)
