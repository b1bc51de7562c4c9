from __future__ import annotations

from dataclasses import replace

import pytest

from rocm_sd.errors import Unsupported
from rocm_sd.verify import compiler, isa
from verify.kernels import layernorm, matmul
from verify.kernels.configs import config_of

TEXT = """
other:
	s_nop 0
.Lfunc_end0:
kernel:                                 ; @kernel
; %bb.0:
	s_load_b128 s[4:7], s[0:1], 0x0
.LBB1_1:                                ; outer
	global_load_b32 v1, v0, s[4:5]
.LBB1_2:                                ; inner
	buffer_load_b128 v[4:7], v0, s[8:11], 0 offen
	ds_load_b128 v[8:11], v2
	v_wmma_f32_16x16x16_f16 v[16:23], v[4:11], v[8:15], v[16:23]
	v_dual_mul_f32 v1, v2, v3 :: v_dual_add_f32 v4, v5, v6
	s_cbranch_scc1 .LBB1_2
; %bb.3:
	s_cbranch_vccnz .LBB1_1
.LBB1_4:
	global_load_d16_hi_b16 v1, v0, s[4:5]
	s_cbranch_execz .LBB1_5
	v_add_f32_e32 v1, v2, v3
	s_branch .LBB1_4
.LBB1_5:
	global_store_b64 v0, v[1:2], s[4:5]
	s_endpgm
.Lfunc_end1:
"""


@pytest.mark.parametrize(
    ("mnemonic", "space", "load", "width"),
    [
        ("global_load_b128", "global", True, 16),
        ("global_load_dwordx4", "global", True, 16),
        ("buffer_load_b96", "global", True, 12),
        ("buffer_store_dwordx3", "global", False, 12),
        ("flat_load_dwordx2", "global", True, 8),
        ("global_store_dword", "global", False, 4),
        ("buffer_load_ushort", "global", True, 2),
        ("buffer_load_u16", "global", True, 2),
        ("global_load_short_d16_hi", "global", True, 2),
        ("global_load_d16_b16", "global", True, 2),
        ("buffer_store_b16", "global", False, 2),
        ("buffer_store_d16_hi_b16", "global", False, 2),
        ("global_load_ubyte", "global", True, 1),
        ("global_load_d16_u8", "global", True, 1),
        ("ds_load_b128", "lds", True, 16),
        ("ds_read_b64", "lds", True, 8),
        ("ds_read2_b64", "lds", True, 16),
        ("ds_load_2addr_b32", "lds", True, 8),
        ("ds_load_2addr_stride64_b64", "lds", True, 16),
        ("ds_read2st64_b32", "lds", True, 8),
        ("ds_write2_b32", "lds", False, 8),
        ("ds_store_2addr_b64", "lds", False, 16),
        ("ds_read_u16_d16", "lds", True, 2),
        ("ds_read_b64_tr_b16", "lds", True, 8),
        ("global_load_tr_b128", "global", True, 16),
        ("scratch_load_b32", "scratch", True, 4),
    ],
)
def test_the_width_of_an_access(mnemonic, space, load, width):
    assert isa.access(mnemonic) == isa.MemoryAccess(space, load, width)


@pytest.mark.parametrize("mnemonic", ["ds_bpermute_b32", "ds_swizzle_b32", "v_add_f32", "s_load_b64", "global_inv"])
def test_what_is_no_access(mnemonic):
    assert isa.access(mnemonic) is None


def test_an_access_of_unknown_width_is_refused():
    with pytest.raises(Unsupported, match="global_load_quux"):
        isa.access("global_load_quux")


@pytest.fixture(scope="module")
def code():
    signature = {"a": "*fp16", "b": "*fp16", "c": "*fp16", "M": "i32", "N": "i32", "K": "i32"}
    tile = {"TILE_M": 64, "TILE_N": 64, "TILE_K": 32}
    return compiler.compile_for("gfx1100", matmul.matmul, config_of(signature, tile, divisible_by_16="MNK"))


def test_loops_are_found_from_the_branches_back(code):
    report = isa.report(replace(code, name="kernel", assembly=TEXT))
    assert [(loop.depth, loop.innermost) for loop in report.loops] == [(1, False), (2, True), (1, True)]
    assert report.has_main_loop
    assert report.matrix == report.matrix_in_main == 1
    assert report.widths("global", loads=True, main=True) == {16: 1}
    assert report.widths("global", loads=True) == {16: 1, 4: 1, 2: 1}
    assert report.widths("lds", loads=True, main=True) == {16: 1}
    assert report.widths("global", loads=False) == {8: 1}
    assert report.share_of_wide_loads() == 1.0
    histogram = dict(report.histogram)
    assert (histogram["v_dual_mul_f32"], histogram["v_dual_add_f32"], histogram["v_add_f32"]) == (1, 1, 1)
    assert "s_nop" not in histogram


# The compiler puts the end before a block that is seldom needed, and that block branches back to it.
NO_LOOP = """
kernel:
	global_load_b128 v[0:3], v0, s[4:5]
	s_cbranch_execnz .LBB0_2
.LBB0_1:
	s_endpgm
.LBB0_2:
	global_load_b128 v[4:7], v0, s[4:5]
	s_cbranch_execz .LBB0_1
	global_store_b128 v0, v[4:7], s[4:5]
	s_endpgm
.Lfunc_end0:
"""


def test_a_branch_back_to_the_end_is_no_loop(code):
    report = isa.report(replace(code, name="kernel", assembly=NO_LOOP))
    assert report.loops == ()
    assert not report.has_main_loop
    assert report.widths("global", loads=True, main=True) == {16: 2}


# As clang turns the main loop of a convolution: it is entered in its middle, and goes back to three of its blocks. From
# .LBB0_3 to its last branch there is no load; the block behind the loop is longer than any part of it.
TURNED = """
kernel:
	global_load_b128 v[0:3], v0, s[4:5]
	s_branch .LBB0_4
.LBB0_1:
	s_add_i32 s5, s5, 1
.LBB0_2:
	buffer_load_b128 v[0:3], v0, s[4:7], 0 offen
.LBB0_3:
	ds_load_b128 v[4:7], v8
	v_wmma_f32_16x16x16_f16 v[16:23], v[0:7], v[0:7], v[16:23]
	s_cbranch_scc1 .LBB0_5
.LBB0_4:
	ds_store_b128 v8, v[0:3]
	s_barrier
	s_cbranch_scc1 .LBB0_3
	s_cmp_lg_u32 s5, 3
	s_cbranch_scc0 .LBB0_1
	s_branch .LBB0_2
.LBB0_5:
	global_load_u16 v0, v0, s[4:5]
	global_load_u16 v1, v0, s[4:5]
	s_endpgm
.Lfunc_end0:
"""


def test_a_turned_loop_is_one_loop_with_all_its_loads(code):
    report = isa.report(replace(code, name="kernel", assembly=TURNED))
    assert [(len(loop.places), loop.depth, loop.innermost) for loop in report.loops] == [(11, 1, True)]
    assert report.widths("global", loads=True, main=True) == {16: 1}
    assert report.widths("lds", loads=False, main=True) == {16: 1}
    assert report.share_of_wide_loads() == 1.0


# Two ways in, and a loop within: the entries of the outer one are removed, and what still leads back is the inner one.
TWO_ENTRIES = """
kernel:
	s_cbranch_scc1 .LBB0_2
.LBB0_1:
	global_load_b64 v[0:1], v0, s[4:5]
.LBB0_2:
	s_add_i32 s5, s5, 1
.LBB0_3:
	global_load_b128 v[0:3], v0, s[4:5]
	s_cbranch_scc1 .LBB0_3
	s_cbranch_vccnz .LBB0_1
	s_cbranch_scc0 .LBB0_2
	s_endpgm
.Lfunc_end0:
"""


def test_a_loop_with_two_entries_is_one_loop(code):
    report = isa.report(replace(code, name="kernel", assembly=TWO_ENTRIES))
    assert [(loop.places, loop.depth, loop.innermost) for loop in report.loops] == [
        ((1, 2, 3, 4, 5, 6), 1, False),
        ((3, 4), 2, True),
    ]
    assert report.widths("global", loads=True, main=True) == {16: 1}


def test_a_text_without_the_kernel_is_refused(code):
    with pytest.raises(Unsupported, match="without the kernel 'absent'"):
        isa.report(replace(code, name="absent", assembly=TEXT))


@pytest.mark.parametrize(("gfx", "matrix"), [("gfx1100", "v_wmma_"), ("gfx1201", "v_wmma_"), ("gfx942", "v_mfma_")])
def test_a_compiled_matmul(gfx, matrix):
    signature = {"a": "*fp16", "b": "*fp16", "c": "*fp16", "M": "i32", "N": "i32", "K": "i32"}
    tile = {"TILE_M": 64, "TILE_N": 64, "TILE_K": 32}
    config = config_of(signature, tile, divisible_by_16="MNK")
    report = isa.report(compiler.compile_for(gfx, matmul.matmul, config))
    assert report.has_main_loop
    assert report.matrix_in_main > 0
    assert any(name.startswith(matrix) for name, _ in report.histogram)
    assert report.share_of_wide_loads() == 1.0
    assert report.lds == 8192  # 64x32 of a and 32x64 of b in fp16
    assert report.waves_per_simd > 0
    assert report.to_dict()["global_loads_in_main"][16] > 0


def test_three_loops_of_a_layernorm():
    signature = {"x": "*fp16", "y": "*fp16", "weight": "*fp16", "bias": "*fp16", "columns": "i32", "eps": "fp32"}
    config = config_of(signature, {"BLOCK": 1024}, divisible_by_16=["columns"])
    report = isa.report(compiler.compile_for("gfx942", layernorm.layernorm, config))
    assert len(report.loops) >= 3
    assert report.matrix == 0
    assert report.spills == 0
