"""Occupancy against LLVM's and NVIDIA's own calculators."""

from __future__ import annotations

import pytest

from rocm_sd.arch import ARCHS, CPU, Vendor, get, occupancy, unknown
from rocm_sd.errors import InvalidOption, Unsupported

# LLVM, llvm/test/CodeGen/AMDGPU/occupancy-levels.ll: waves per SIMD by VGPRs, for one target of each kind.
# Columns: gfx906 (gfx9), gfx950, gfx1030 wave64, gfx1030 wave32, gfx1100 wave64, gfx1100 wave32.
LLVM_COLUMNS = [("gfx906", 64), ("gfx950", 64), ("gfx1030", 64), ("gfx1030", 32), ("gfx1100", 64), ("gfx1100", 32)]
LLVM_LEVELS = {
    24: (10, 8, 16, 16, 16, 16),
    28: (9, 8, 16, 16, 16, 16),
    32: (8, 8, 16, 16, 16, 16),
    36: (7, 8, 12, 16, 16, 16),
    44: (5, 8, 10, 16, 16, 16),
    56: (4, 8, 9, 16, 12, 16),
    64: (4, 8, 8, 16, 10, 16),
    72: (3, 7, 7, 12, 10, 16),
    84: (3, 5, 5, 10, 9, 16),
    96: (2, 5, 5, 10, 8, 16),
    100: (2, 4, 4, 9, 7, 12),
    128: (2, 4, 4, 8, 5, 10),
    168: (1, 3, 3, 5, 4, 9),
    200: (1, 2, 2, 4, 3, 7),
    256: (1, 2, 2, 4, 2, 5),
}

# cuda_occupancy.h of CUDA 13.1, carve-out 100%: target, registers, warps, shared bytes, resident blocks per SM.
NVIDIA_BLOCKS = [
    ("sm_75", 32, 8, 0, 4),
    ("sm_75", 64, 4, 1000, 8),
    ("sm_80", 32, 8, 166912, 1),
    ("sm_80", 64, 8, 49152, 3),
    ("sm_80", 65, 32, 0, 0),
    ("sm_86", 32, 8, 166912, 0),
    ("sm_86", 40, 4, 0, 12),
    ("sm_86", 128, 4, 24576, 4),
    ("sm_89", 33, 1, 0, 24),
    ("sm_90", 32, 1, 12288, 17),
    ("sm_90", 128, 4, 232448, 1),
    ("sm_90", 168, 4, 65536, 3),
    ("sm_90", 255, 8, 0, 1),
    ("sm_100", 96, 3, 8192, 6),
    ("sm_120", 16, 1, 1000, 24),
    ("sm_120", 64, 16, 49152, 2),
]


@pytest.mark.parametrize("vgprs", LLVM_LEVELS)
def test_vgpr_limits_are_those_of_llvm(vgprs):
    got = [occupancy(ARCHS[name], vgprs, 0, 1, wave_size=wave).waves_per_simd for name, wave in LLVM_COLUMNS]
    assert tuple(got) == LLVM_LEVELS[vgprs]


@pytest.mark.parametrize(("name", "registers", "warps", "shared", "blocks"), NVIDIA_BLOCKS)
def test_resident_blocks_are_those_of_the_cuda_calculator(name, registers, warps, shared, blocks):
    result = occupancy(ARCHS[name], registers, shared, warps)
    assert (result.workgroups, result.unit) == (blocks, "SM")
    assert result.fraction == pytest.approx(blocks * warps / (ARCHS[name].max_waves_per_simd * 4))


def test_llvm_calc_occupancy_example():
    """LLVM command guide, llvm-calc-occupancy: gfx90a, workgroup 512, 50 VGPRs, 30 SGPRs is 8 waves a SIMD, 32 a CU."""
    result = occupancy(ARCHS["gfx90a"], 50, 0, 512 // 64, sgprs=30)
    assert (result.waves_per_simd, result.workgroups * 8, result.fraction) == (8, 32, 1.0)
    assert result.limited_by == "waves"


def test_lds_is_shared_by_the_two_cus_of_a_wgp():
    """occupancy-levels.ll, used_lds_8252: 8252 bytes, workgroups of 64 threads: 4 waves a SIMD at wave64."""
    gfx1100 = ARCHS["gfx1100"]
    # LLVM divides 128 KiB by 8252 (15 workgroups); the hardware hands out 9 KiB for each, which makes 14.
    wide = occupancy(gfx1100, 8, 8252, 1, wave_size=64)
    assert (wide.workgroups, wide.unit, wide.limited_by, wide.waves_per_simd) == (14, "WGP", "lds", 4)
    assert wide.workgroups_per_cu == 7.0
    narrow = occupancy(gfx1100, 8, 40 * 1024, 1, cu_mode=True)
    assert (narrow.workgroups, narrow.unit) == (1, "CU")
    assert occupancy(gfx1100, 8, 40 * 1024, 1).workgroups == 3, "two CUs hold three where one holds one"


def test_a_big_vgpr_part_holds_more_of_the_same_kernel():
    """occupancy-levels.ll, used_96_vgprs at wave32: 16 waves with 1536 registers a lane, 10 with 1024."""
    assert occupancy(ARCHS["gfx1100"], 96, 0, 4).waves_per_simd == 16
    assert occupancy(ARCHS["gfx1102"], 96, 0, 4).waves_per_simd == 10


def test_accumulation_registers_share_the_file_from_gfx90a_on():
    unified = occupancy(ARCHS["gfx942"], 128, 0, 1, agprs=100)
    assert (unified.waves_per_simd, unified.limited_by) == (2, "vgprs")
    separate = occupancy(ARCHS["gfx908"], 60, 0, 1, agprs=100)
    assert (separate.waves_per_simd, separate.limited_by) == (2, "agprs")
    assert occupancy(ARCHS["gfx908"], 60, 0, 1).waves_per_simd == 4


def test_the_trap_handler_takes_sgprs_on_gfx9_and_rdna_is_not_limited():
    assert [occupancy(ARCHS["gfx906"], 8, 0, 1, sgprs=sgprs).waves_per_simd for sgprs in (64, 80, 96, 104)] == [
        10,
        8,
        7,
        6,
    ]
    assert occupancy(ARCHS["gfx1100"], 8, 0, 1, sgprs=106).waves_per_simd == 16


@pytest.mark.parametrize(
    ("name", "kernel", "reason"),
    [
        ("gfx1100", {"vgprs": 8, "lds": 64 * 1024 + 1, "waves_per_workgroup": 1}, "lds"),
        ("gfx1100", {"vgprs": 257, "lds": 0, "waves_per_workgroup": 1}, "vgprs"),
        ("gfx1100", {"vgprs": 256, "lds": 0, "waves_per_workgroup": 32}, "vgprs"),
        ("gfx1100", {"vgprs": 8, "lds": 0, "waves_per_workgroup": 33}, "threads"),
        ("gfx906", {"vgprs": 8, "lds": 0, "waves_per_workgroup": 1, "agprs": 4}, "agprs"),
        ("sm_80", {"vgprs": 8, "lds": 163 * 1024 + 1, "waves_per_workgroup": 1}, "lds"),
    ],
)
def test_a_kernel_that_cannot_run_holds_no_workgroup(name, kernel, reason):
    result = occupancy(ARCHS[name], **kernel)
    assert (result.workgroups, result.waves_per_simd, result.fraction) == (0, 0, 0.0)
    assert result.limited_by == reason


def test_workgroups_are_limited_by_barriers_only_when_they_have_more_than_one_wave():
    gfx942 = ARCHS["gfx942"]
    assert occupancy(gfx942, 8, 0, 1).workgroups == 32
    assert occupancy(gfx942, 8, 0, 2).workgroups == 16
    assert occupancy(ARCHS["sm_86"], 16, 0, 1).limited_by == "workgroups"


@pytest.mark.parametrize("entry", [unknown("gfx1250"), CPU, get("sm_121")], ids=lambda entry: entry.name)
def test_unknown_figures_are_an_error_and_not_a_guess(entry):
    with pytest.raises(Unsupported, match="wave_size is not known"):
        occupancy(entry, 8, 0, 1)


def test_impossible_requests_are_refused():
    with pytest.raises(InvalidOption, match="Use one of: 64"):
        occupancy(ARCHS["gfx942"], 8, 0, 1, wave_size=32)
    with pytest.raises(ValueError, match="at least one wave"):
        occupancy(ARCHS["gfx942"], 8, 0, 0)
    with pytest.raises(ValueError, match="negative"):
        occupancy(ARCHS["gfx942"], -1, 0, 1)


def compiler_waves(llvm, name: str, *, vgprs: int, wave: int, waves: int, lds: int = 0, cu_mode: bool = False) -> int:
    """What the AMDGPU backend prints as "Occupancy" for a kernel that touches exactly this much."""
    features = ["+wavefrontsize64"] if wave == 64 and ARCHS[name].wave_size == 32 else []
    features += ["+cumode"] if cu_mode else []
    variable = f"@lds = internal addrspace(3) global [{lds} x i8] poison, align 16" if lds else ""
    store = "store volatile i8 0, ptr addrspace(3) @lds" if lds else ""
    size = wave * waves
    module = f"""
target triple = "amdgcn-amd-amdhsa"
{variable}
define amdgpu_kernel void @kernel() #0 {{
  call void asm sideeffect "", "~{{v{vgprs - 1}}}"()
  {store}
  ret void
}}
attributes #0 = {{ "amdgpu-flat-work-group-size"="{size},{size}" "target-features"="{",".join(features)}" }}
"""
    text = llvm.translate_to_asm(module, "amdgcn-amd-amdhsa", name, ",".join(features), [], False, False, False)
    return int(next(line.rsplit(":", 1)[1] for line in text.splitlines() if "Occupancy:" in line))


@pytest.mark.parametrize("name", [entry.name for entry in ARCHS.values() if entry.vendor is Vendor.AMD])
def test_the_compiler_agrees(name):
    """The compiler that Triton ships is asked for every AMD entry; LDS sizes are multiples of the granule."""
    # The binding is internal to Triton, and its arguments changed up to this version.
    pytest.importorskip("triton", minversion="3.9")
    llvm = pytest.importorskip("triton._C.libtriton").llvm
    llvm.init_targets()
    entry = ARCHS[name]
    for wave in entry.wave_sizes:
        for vgprs in (8, 24, 40, 65, 96, 121, 168, 256):
            expected = compiler_waves(llvm, name, vgprs=vgprs, wave=wave, waves=1)
            assert occupancy(entry, vgprs, 0, 1, wave_size=wave).waves_per_simd == expected, (wave, vgprs)
        for waves, lds in [(1, 10240), (2, 5120), (4, 20480), (8, 40960), (4, 61440)]:
            for cu_mode in {False, entry.cus_per_wgp == 2}:
                expected = compiler_waves(llvm, name, vgprs=8, wave=wave, waves=waves, lds=lds, cu_mode=cu_mode)
                got = occupancy(entry, 8, lds, waves, wave_size=wave, cu_mode=cu_mode)
                assert got.waves_per_simd == expected, (wave, waves, lds, cu_mode)
