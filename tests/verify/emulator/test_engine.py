"""The engine on kernels of a few instructions: registers, branches, batches, and every error it reports by itself."""

from __future__ import annotations

import numpy as np
import pytest
from hand_assembly import kernel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("tinygrad")
pytest.importorskip("triton")

from rocm_sd.errors import InvalidOption, Unsupported
from rocm_sd.verify.code_object import CodeObject
from rocm_sd.verify.emulator import BudgetExceeded, Buffer, EmulationError, UnknownInstruction, launch

WORDS = st.one_of(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF]),
)
MASK = 0xFFFFFFFF


def signed(value: int) -> int:
    return value - 2**32 if value >> 31 else value


def overflows(value: int) -> int:
    return int(not -(2**31) <= value < 2**31)


def nonzero(value: int) -> tuple[int, int]:
    return value & MASK, int(value & MASK != 0)


def field(a: int, b: int, *, sign: bool) -> tuple[int, int]:
    width = min(b >> 16 & 0x7F, 32)
    source = signed(a) if sign else a
    found = source >> (b & 31) & ((1 << width) - 1)
    if sign and width and found >> (width - 1):
        found -= 1 << width
    return nonzero(found)


# What each instruction does to (a, b, scc), said once more in Python integers.
TWO_SOURCES = {
    "s_add_u32": lambda a, b, _c: (a + b & MASK, a + b >> 32),
    "s_addc_u32": lambda a, b, c: (a + b + c & MASK, a + b + c >> 32),
    "s_sub_u32": lambda a, b, _c: (a - b & MASK, int(b > a)),
    "s_subb_u32": lambda a, b, c: (a - b - c & MASK, int(b + c > a)),
    "s_add_i32": lambda a, b, _c: (a + b & MASK, overflows(signed(a) + signed(b))),
    "s_sub_i32": lambda a, b, _c: (a - b & MASK, overflows(signed(a) - signed(b))),
    "s_absdiff_i32": lambda a, b, _c: nonzero(abs(signed(a - b & MASK))),
    "s_lshl_b32": lambda a, b, _c: nonzero(a << (b & 31)),
    "s_lshr_b32": lambda a, b, _c: nonzero(a >> (b & 31)),
    "s_ashr_i32": lambda a, b, _c: nonzero(signed(a) >> (b & 31)),
    "s_lshl3_add_u32": lambda a, b, _c: ((a << 3) + b & MASK, int((a << 3) + b > MASK)),
    "s_min_i32": lambda a, b, _c: (min(signed(a), signed(b)) & MASK, int(signed(a) < signed(b))),
    "s_max_u32": lambda a, b, _c: (max(a, b), int(a >= b)),
    "s_and_b32": lambda a, b, _c: nonzero(a & b),
    "s_or_b32": lambda a, b, _c: nonzero(a | b),
    "s_xor_b32": lambda a, b, _c: nonzero(a ^ b),
    "s_nand_b32": lambda a, b, _c: nonzero(~(a & b)),
    "s_xnor_b32": lambda a, b, _c: nonzero(~(a ^ b)),
    "s_and_not1_b32": lambda a, b, _c: nonzero(a & ~b),
    "s_bfe_u32": lambda a, b, _c: field(a, b, sign=False),
    "s_bfe_i32": lambda a, b, _c: field(a, b, sign=True),
    "s_bfm_b32": lambda a, b, c: (((1 << (a & 31)) - 1) << (b & 31) & MASK, c),
    "s_mul_i32": lambda a, b, c: (a * b & MASK, c),
    "s_mul_hi_u32": lambda a, b, c: (a * b >> 32, c),
    "s_mul_hi_i32": lambda a, b, c: (signed(a) * signed(b) >> 32 & MASK, c),
    "s_cselect_b32": lambda a, b, c: (a if c else b, c),
    "s_pack_lh_b32_b16": lambda a, b, c: (a & 0xFFFF | b & 0xFFFF0000, c),
}
ONE_SOURCE = {
    "s_not_b32": lambda a, _c: nonzero(~a),
    "s_brev_b32": lambda a, c: (int(f"{a:032b}"[::-1], 2), c),
    "s_ctz_i32_b32": lambda a, c: ((a & -a).bit_length() - 1 & MASK, c),
    "s_clz_i32_u32": lambda a, c: (32 - a.bit_length() if a else MASK, c),
    "s_bcnt1_i32_b32": lambda a, _c: nonzero(a.bit_count()),
    "s_bcnt0_i32_b32": lambda a, _c: nonzero(32 - a.bit_count()),
    "s_sext_i32_i8": lambda a, c: ((a & 0xFF) - (a & 0x80) * 2 & MASK, c),
    "s_sext_i32_i16": lambda a, c: ((a & 0xFFFF) - (a & 0x8000) * 2 & MASK, c),
    "s_abs_i32": lambda a, _c: nonzero(abs(signed(a))),
}
COMPARES = {
    "s_cmp_lt_i32": lambda a, b: signed(a) < signed(b),
    "s_cmp_ge_i32": lambda a, b: signed(a) >= signed(b),
    "s_cmp_gt_u32": lambda a, b: a > b,
    "s_cmp_le_u32": lambda a, b: a <= b,
    "s_cmp_eq_u32": lambda a, b: a == b,
    "s_cmp_lg_i32": lambda a, b: a != b,
    "s_bitcmp1_b32": lambda a, b: bool(a >> (b & 31) & 1),
}

# One workgroup for each row of inputs (a, b, scc); the row is fetched by the number of the workgroup.
SCALAR = """
  s_load_b64 s[4:5], s[0:1], 0x0
  s_load_b64 s[6:7], s[0:1], 0x8
  s_lshl_b32 s8, s2, 4
  s_lshl_b32 s9, s2, 3
  s_waitcnt lgkmcnt(0)
  s_load_b128 s[12:15], s[4:5], s8
  s_waitcnt lgkmcnt(0)
  s_cmp_lg_u32 s14, 0
  s_mov_b32 s20, 0
  {op}
  s_cselect_b32 s21, 1, 0
  s_mov_b32 exec_lo, 1
  v_mov_b32 v1, s20
  v_mov_b32 v2, s21
  v_mov_b32 v3, s9
  global_store_b64 v3, v[1:2], s[6:7]
  s_endpgm
"""


def run_scalar(op: str, rows: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    inputs = np.zeros((len(rows), 4), np.uint32)
    inputs[:, :3] = rows
    results = np.zeros((len(rows), 2), np.uint32)
    code = kernel(SCALAR.format(op=op), pointers=2)
    launch(code, len(rows), [Buffer(inputs), Buffer(results, initialised=False, must_write=True)])
    return [(int(value), int(scc)) for value, scc in results]


def test_scalar_loads_of_less_than_a_dword():
    """gfx12 has them: a kernel that reads one half from a place that all lanes share."""
    body = """
      s_load_b128 s[4:7], s[0:1], 0x0
      s_wait_kmcnt 0x0
      s_load_u8 s8, s[4:5], 0x3
      s_load_i8 s9, s[4:5], 0x3
      s_load_u16 s10, s[4:5], 0x6
      s_load_i16 s11, s[4:5], 0x6
      s_wait_kmcnt 0x0
      s_mov_b32 exec_lo, 1
      v_mov_b32 v5, 0
      v_mov_b32 v1, s8
      v_mov_b32 v2, s9
      v_mov_b32 v3, s10
      v_mov_b32 v4, s11
      global_store_b128 v5, v[1:4], s[6:7]
      s_endpgm
    """
    given, found = np.array([0xF1234567, 0x89ABCDEF], np.uint32), np.zeros(4, np.uint32)
    buffers = [Buffer(given), Buffer(found, initialised=False, must_write=True)]
    launch(kernel(body, "gfx1201", pointers=2), 1, buffers)
    assert [int(each) for each in found] == [0xF1, 0xFFFFFFF1, 0x89AB, 0xFFFF89AB]


ROWS = st.lists(st.tuples(WORDS, WORDS, st.integers(0, 1)), min_size=1, max_size=24)
QUICK = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("name", TWO_SOURCES)
@QUICK
@given(rows=ROWS)
def test_scalar_instruction_of_two_sources(name, rows):
    expected = [TWO_SOURCES[name](*row) for row in rows]
    assert run_scalar(f"{name} s20, s12, s13", rows) == expected


@pytest.mark.parametrize("name", ONE_SOURCE)
@QUICK
@given(rows=ROWS)
def test_scalar_instruction_of_one_source(name, rows):
    expected = [ONE_SOURCE[name](a, scc) for a, _, scc in rows]
    assert run_scalar(f"{name} s20, s12", rows) == expected


@pytest.mark.parametrize("name", COMPARES)
@QUICK
@given(rows=ROWS)
def test_scalar_compare(name, rows):
    assert run_scalar(f"{name} s12, s13", rows) == [(0, int(COMPARES[name](a, b))) for a, b, _ in rows]


LANES = """
  s_load_b64 s[4:5], s[0:1], 0x0
  v_lshlrev_b32 v9, 2, v0
  {body}
  s_waitcnt lgkmcnt(0)
  global_store_b32 v9, v1, s[4:5]
  s_endpgm
"""


def run_lanes(body: str, gfx: str = "gfx1100", **options: int) -> np.ndarray:
    result = np.zeros((options.get("waves", 1), 64 if gfx.startswith("gfx9") else 32), np.uint32)
    text = LANES
    if gfx.startswith("gfx12"):
        text = LANES.replace("s_waitcnt lgkmcnt(0)", "s_wait_kmcnt 0x0")
    if gfx.startswith("gfx9"):
        text = LANES.replace("s_load_b64", "s_load_dwordx2").replace("global_store_b32", "global_store_dword")
    launch(kernel(text.format(body=body), gfx, **options), 1, [Buffer(result, initialised=False, must_write=True)])
    return result


@pytest.mark.parametrize("gfx", ["gfx1100", "gfx1201", "gfx942"])
def test_masked_lanes_keep_their_value(gfx):
    execute = "exec" if gfx == "gfx942" else "exec_lo"
    wide = "b64" if gfx == "gfx942" else "b32"
    body = f"v_mov_b32 v1, 7\n s_mov_{wide} {execute}, 5\n v_mov_b32 v1, 9\n s_mov_{wide} {execute}, -1"
    lanes = run_lanes(body, gfx)[0]
    assert lanes[:4].tolist() == [9, 7, 9, 7]
    assert (lanes[4:] == 7).all()


def test_saveexec_and_branch_on_an_empty_mask():
    body = """
      v_mov_b32 v1, 1
      v_cmp_lt_u32 vcc_lo, 100, v0
      s_and_saveexec_b32 s10, vcc_lo
      s_cbranch_execz .Lskip
      v_mov_b32 v1, 2
    .Lskip:
      s_or_b32 exec_lo, exec_lo, s10
    """
    assert (run_lanes(body)[0] == 1).all()


def test_waves_that_part_meet_again_with_their_own_registers():
    # Wave k of the workgroup goes round the loop k + 1 times.
    body = """
      v_lshrrev_b32 v2, 5, v0
      v_readfirstlane_b32 s8, v2
      v_mov_b32 v1, 0
    .Lloop:
      v_add_nc_u32 v1, 10, v1
      s_sub_i32 s8, s8, 1
      s_cmp_ge_i32 s8, 0
      s_cbranch_scc1 .Lloop
      v_add_nc_u32 v1, v1, v2
    """
    lanes = run_lanes(body, waves=4)
    assert lanes[:, 0].tolist() == [10, 21, 32, 43]
    assert (lanes == lanes[:, :1]).all()


def test_a_dual_instruction_reads_before_it_writes():
    body = """
      v_mov_b32 v2, 3
      v_mov_b32 v3, 4
      v_dual_mov_b32 v2, v3 :: v_dual_mov_b32 v3, v2
      v_lshlrev_b32 v2, 8, v2
      v_or_b32 v1, v2, v3
    """
    assert (run_lanes(body)[0] == 0x403).all()


def test_sixteen_bit_halves_are_written_apart():
    body = "v_mov_b32 v1, 0x12345678\n v_mov_b16 v1.h, 0x9abc\n"
    assert (run_lanes(body)[0] == 0x9ABC5678).all()


def test_dpp_with_its_own_destination_as_source():
    body = "v_mov_b32 v1, v0\n v_add_nc_u32_dpp v1, v1, v1 row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:1"
    lane = np.arange(32)
    assert (run_lanes(body)[0] == lane + np.where(lane % 16, lane - 1, 0)).all()


def test_sub_dword_addressing():
    body = "v_mov_b32 v2, 0x1234\n s_nop 1\n v_add_u32_sdwa v1, v2, v2 dst_sel:DWORD src0_sel:BYTE_1 src1_sel:BYTE_0"
    assert (run_lanes(body, "gfx942")[0] == 0x12 + 0x34).all()


@pytest.mark.parametrize("table", [0x00, 0x1B, 0x96, 0xCA, 0xE8, 0xFF])
def test_three_input_logic_reads_its_table_from_the_modifier_fields(table):
    a, b, c = 0xF0F0A5A5, 0xCCCC3C3C, 0xAAAA0FF0
    body = f"v_mov_b32 v2, {a}\n v_mov_b32 v3, {b}\n v_mov_b32 v4, {c}\n v_bitop3_b32 v1, v2, v3, v4 bitop3:{table}"
    bits = [table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1 for i in range(32)]
    assert (run_lanes(body, "gfx950")[0] == sum(bit << i for i, bit in enumerate(bits))).all()


E4M3 = [0x38, 0x3C, 0x40, 0x44]  # 1, 1.5, 2 and 3; the same codes stand for half of that where the bias is 8
WORD = sum(code << 8 * place for place, code in enumerate(E4M3))


def floats(lanes: np.ndarray) -> set[float]:
    return set(lanes[0].view(np.float32).tolist())


@pytest.mark.parametrize(("byte", "value"), list(enumerate([1.0, 1.5, 2.0, 3.0])))
def test_eight_bit_floats_are_picked_by_byte_and_read_in_the_format_of_the_gpu(byte, value):
    body = f"v_mov_b32 v2, {WORD}\n v_cvt_f32_fp8_e64 v1, v2 byte_sel:{byte}"
    assert floats(run_lanes(body, "gfx1201")) == {value}
    body = f"v_mov_b32 v2, {WORD}\n v_cvt_f32_fp8_sdwa v1, v2 src0_sel:BYTE_{byte}"
    assert floats(run_lanes(body, "gfx942")) == {value / 2}


def test_pairs_of_eight_bit_floats_are_written_to_the_half_that_is_named():
    body = "v_mov_b32 v1, 0x1234\n v_mov_b32 v2, 1.0\n v_cvt_pk_fp8_f32 v1, v2, v2 op_sel:[0,0,1]"
    assert (run_lanes(body, "gfx1201")[0] == 0x38381234).all()
    assert (run_lanes(body, "gfx942")[0] == 0x40401234).all()


def test_a_register_that_the_kernel_does_not_declare():
    with pytest.raises(EmulationError, match="beyond the 32"):
        run_lanes("v_mov_b32 v40, 1")


DPP = "row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:1"


def test_dpp_in_the_long_encoding_and_on_compares():
    lane = np.arange(32)
    before = np.where(lane % 16, lane - 1, 0)
    assert (run_lanes(f"v_add_nc_u32_e64_dpp v1, v0, v0 {DPP}")[0] == lane + before).all()
    assert (run_lanes(f"v_cmp_lt_u32_e64_dpp s20, v0, v0 {DPP}\n v_mov_b32 v1, s20")[0] == 0xFFFFFFFE).all()
    assert (run_lanes("v_mov_b32_dpp v1, v0 dpp8:[7,6,5,4,3,2,1,0]")[0] == lane ^ 7).all()


def test_accumulation_registers_hold_values_loads_and_matrix_sums():
    body = "v_accvgpr_write_b32 a3, v0\n s_nop 2\n v_mov_b32 v3, 0\n v_accvgpr_read_b32 v1, a3"
    assert (run_lanes(body, "gfx942", agprs=16)[0] == np.arange(64)).all()
    body = """
      ds_write_b32 v9, v0
      s_waitcnt lgkmcnt(0)
      ds_read_b32 a5, v9
      s_waitcnt lgkmcnt(0)
      v_accvgpr_read_b32 v1, a5
    """
    assert (run_lanes(body, "gfx942", agprs=16, lds=256)[0] == np.arange(64)).all()
    # Ones times ones, 16 deep, added to 0.5.
    body = """
      v_mov_b32 v2, 0x3c003c00
      v_mov_b32 v3, 0x3c003c00
      v_mov_b32 v4, 0.5
    """ + "\n".join(f"v_accvgpr_write_b32 a{n}, v4" for n in range(4))
    body += "\n v_mfma_f32_16x16x16_f16 a[0:3], v[2:3], v[2:3], a[0:3]\n s_nop 7\n v_accvgpr_read_b32 v1, a2"
    assert floats(run_lanes(body, "gfx942", agprs=16)) == {16.5}


def test_a_jump_through_a_register_and_back():
    body = """
      v_mov_b32 v1, 1
      s_getpc_b64 s[10:11]
    .Lhere:
      s_add_u32 s10, s10, .Lfunction-.Lhere
      s_addc_u32 s11, s11, 0
      s_swappc_b64 s[12:13], s[10:11]
      s_branch .Lafter
    .Lfunction:
      v_add_nc_u32 v1, 41, v1
      s_setpc_b64 s[12:13]
    .Lafter:
    """
    assert (run_lanes(body)[0] == 42).all()


def test_scratch_is_private_to_a_lane():
    body = """
      v_mul_u32_u24 v2, v0, v0
      scratch_store_b32 off, v2, off offset:4
      v_mov_b32 v2, 0
      s_waitcnt_vscnt null, 0x0
      scratch_load_b32 v1, off, off offset:4
      s_waitcnt vmcnt(0)
    """
    assert (run_lanes(body, scratch=16)[0] == np.arange(32) ** 2).all()


def test_workgroup_numbers():
    for gfx, x, y in (("gfx1100", "s2", "s3"), ("gfx942", "s2", "s3"), ("gfx1201", "ttmp9", "ttmp7")):
        text = LANES
        if gfx == "gfx942":
            text = LANES.replace("s_load_b64", "s_load_dwordx2").replace("global_store_b32", "global_store_dword")
        if gfx == "gfx1201":
            text = LANES.replace("s_waitcnt lgkmcnt(0)", "s_wait_kmcnt 0x0")
        wave = 64 if gfx == "gfx942" else 32
        body = f"s_lshl_b32 s20, {y}, 2\n s_add_i32 s20, s20, {x}\n s_lshl_b32 s21, s20, {4 + wave // 32}\n"
        if gfx == "gfx942":
            body += "v_add_u32 v9, s21, v0\n v_lshlrev_b32 v9, 2, v9\n v_mov_b32 v1, s20"
        else:
            body += "v_add_nc_u32 v9, s21, v0\n v_lshlrev_b32 v9, 2, v9\n v_mov_b32 v1, s20"
        if gfx == "gfx1201":
            body = body.replace("s_add_i32", "s_add_co_i32")
        result = np.zeros((12, wave), np.uint32)
        launch(kernel(text.format(body=body), gfx), (4, 3), [Buffer(result, initialised=False, must_write=True)])
        assert (result == np.arange(12)[:, None]).all(), gfx


def test_batches_do_not_change_the_result():
    text = LANES.format(body="s_lshl_b32 s20, s2, 7\n v_add_nc_u32 v9, s20, v9\n v_mov_b32 v1, s2")
    for batch in (1, 3, 64):
        result = np.zeros((10, 32), np.uint32)
        counters = launch(kernel(text), 10, [Buffer(result, initialised=False, must_write=True)], batch=batch)
        assert (result == np.arange(10)[:, None]).all()
        assert counters.waves == 10


def test_an_instruction_that_is_not_known_is_named_with_its_address():
    code = kernel("s_nop 0\n s_sethalt 1\n s_endpgm")
    with pytest.raises(UnknownInstruction, match="s_sethalt") as caught:
        launch(code, 1, [None])
    assert caught.value.address == code.text_address + code.entry_offset + 4


def test_bytes_that_are_no_instruction():
    with pytest.raises(UnknownInstruction, match="0xffffffff"):
        launch(kernel(".long 0xffffffff\n s_endpgm"), 1, [None])


def test_running_off_the_end_of_the_code():
    with pytest.raises(UnknownInstruction):
        launch(kernel("s_branch 1024"), 1, [None])


def test_an_endless_loop_is_stopped():
    with pytest.raises(BudgetExceeded, match="budget"):
        launch(kernel(".Lagain:\n s_branch .Lagain"), 1, [None], budget=1000)


def test_an_architecture_that_is_not_emulated():
    code = kernel("s_endpgm")
    other = CodeObject(**{name: getattr(code, name) for name in code.__slots__} | {"arch": _arch("gfx90a")})
    with pytest.raises(Unsupported, match="gfx90a"):
        launch(other, 1, [None])


def _arch(name: str):
    from rocm_sd import arch

    return arch.get(name)


@pytest.mark.parametrize("grid", [0, (1, 0), (1, 1, 1, 1), -3])
def test_a_grid_that_is_none(grid):
    with pytest.raises(InvalidOption, match="grid"):
        launch(kernel("s_endpgm"), grid, [None])


def test_argument_count_and_kind():
    code = kernel("s_endpgm", pointers=2)
    with pytest.raises(InvalidOption, match="takes 2"):
        launch(code, 1, [None])
    with pytest.raises(InvalidOption, match="argument 1"):
        launch(code, 1, [None, 3])
