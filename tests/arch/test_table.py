"""The table is complete, every figure says where it comes from, and an unknown name inherits nothing."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys

import pytest

from rocm_sd import arch
from rocm_sd.arch import ARCHS, Arch, Fp8, MatrixUnit, Vendor

IDENTITY = {"name", "family", "vendor", "known", "product", "sources"}
AMD = [
    ["gfx906", "gfx908", "gfx90a", "gfx942", "gfx950"],
    ["gfx1030", "gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1200", "gfx1201"],
]
NVIDIA = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
GPUS = [entry for entry in ARCHS.values() if entry.vendor is not Vendor.NONE]


def figures(entry: Arch) -> dict[str, object]:
    """Every fact of an entry, peak rates one by one; what is unknown (None, or an empty collection) is no fact."""
    facts = {field.name: getattr(entry, field.name) for field in dataclasses.fields(entry)}
    facts = {name: value for name, value in facts.items() if name not in IDENTITY | {"peak_tflops"}}
    facts |= {f"peak_tflops.{dtype}": rate for dtype, rate in entry.peak_tflops}
    return {name: value for name, value in facts.items() if value is not None and value not in ((), frozenset())}


def test_the_table_has_every_architecture_that_is_promised():
    assert list(ARCHS) == [*AMD[0], *AMD[1], *NVIDIA, "cpu"]
    assert all(name == entry.name for name, entry in ARCHS.items())


@pytest.mark.parametrize("entry", ARCHS.values(), ids=lambda entry: entry.name)
def test_every_figure_has_a_source_and_every_source_a_figure(entry):
    sources = dict(entry.sources)
    assert set(figures(entry)) - set(sources) == set()
    assert all(len(citation) > 8 for citation in sources.values())
    empty = {name for name in sources if name not in figures(entry)}
    assert empty <= {"matrix_dtypes"}, "an empty set of matrix dtypes is a fact; nothing else empty is"


@pytest.mark.parametrize("entry", GPUS, ids=lambda entry: entry.name)
def test_a_gpu_entry_has_all_that_occupancy_and_dispatch_ask_for(entry):
    needed = [
        "wave_size max_threads_per_workgroup max_workgroups_per_cu lds_per_workgroup lds_per_cu lds_granule",
        "lds_reserved cus_per_wgp vgprs_per_wave vgpr_file_bytes simds_per_cu max_waves_per_simd matrix_unit fp8",
        "has_bf16 integrated datacenter compute_units l2_bytes triton_backend triton_supported",
    ]
    missing = [name for name in " ".join(needed).split() if getattr(entry, name) is None]
    assert missing == []
    assert entry.wave_size in entry.wave_sizes
    assert all(entry.vgpr_granule(wave) for wave in entry.wave_sizes)
    assert entry.peak("float16")
    assert entry.bandwidth_gbps or entry.integrated, "only a chip on system memory may lack a bandwidth"
    assert entry.lds_per_workgroup <= entry.lds_per_cu * entry.cus_per_wgp


@pytest.mark.parametrize("entry", GPUS, ids=lambda entry: entry.name)
def test_dtypes_and_flags_agree(entry):
    assert ("float8" in entry.matrix_dtypes) == (entry.fp8 is not Fp8.NONE)
    assert ("bfloat16" in entry.matrix_dtypes) == entry.has_bf16
    has_matrix_unit = entry.matrix_unit not in (MatrixUnit.NONE, MatrixUnit.DOT)
    assert has_matrix_unit == bool(entry.matrix_dtypes)
    assert {dtype for dtype, _ in entry.peak_tflops} <= entry.matrix_dtypes | {"float16", "float32"}


def test_register_files_add_up_to_the_documented_ones():
    """ROCm GPU specifications, "VGPR File (KiB)": per CU on CDNA, per WGP (two CUs) on RDNA."""
    documented = {"gfx906": 256, "gfx90a": 512, "gfx942": 512, "gfx950": 512, "gfx1030": 512, "gfx1100": 768}
    documented |= {"gfx1101": 768, "gfx1102": 512, "gfx1103": 512, "gfx1150": 512, "gfx1151": 768, "gfx1201": 768}
    for name, kib in documented.items():
        entry = ARCHS[name]
        assert entry.vgpr_file_bytes * entry.simds_per_cu * entry.cus_per_wgp == kib * 1024, name
    mi100 = ARCHS["gfx908"]
    assert (mi100.vgpr_file_bytes * 4, mi100.agpr_file_bytes * 4) == (256 * 1024, 256 * 1024)


def test_nvidia_register_file_is_65536_registers_an_sm():
    """CUDA programming guide, technical specifications: 64 K 32-bit registers per SM on all of these."""
    for name in NVIDIA:
        assert ARCHS[name].vgpr_file_bytes * ARCHS[name].simds_per_cu == 65536 * 4


@pytest.mark.parametrize(
    ("name", "units", "flops_per_clock", "boost_ghz"),
    [
        ("gfx1030", 80, 256, 2.25),
        ("gfx1100", 96, 512, 2.5),
        ("gfx1151", 40, 512, 2.9),
        ("gfx1201", 64, 1024, 2.97),
        ("gfx908", 120, 1024, 1.502),
        ("gfx90a", 104, 1024, 1.7),
    ],
)
def test_float16_peaks_are_units_times_rate_times_clock(name, units, flops_per_clock, boost_ghz):
    """GPUOpen and AMD's matrix-core articles give the FLOP per clock and compute unit."""
    assert ARCHS[name].compute_units == units
    assert ARCHS[name].peak("float16") == pytest.approx(units * flops_per_clock * boost_ghz / 1000, rel=0.01)


def test_unconfirmed_figures_say_so():
    assert not ARCHS["gfx1102"].is_confirmed("bandwidth_gbps")
    assert ARCHS["gfx1100"].is_confirmed("bandwidth_gbps")
    assert not ARCHS["gfx1103"].is_confirmed("bandwidth_gbps"), "unknown is not confirmed"
    assert ARCHS["gfx1103"].bandwidth_gbps is None


def test_known_differences_between_neighbours():
    assert ARCHS["gfx942"].fp8 is Fp8.FNUZ
    assert ARCHS["gfx950"].fp8 is Fp8.OCP
    assert ARCHS["gfx1100"].matrix_unit is MatrixUnit.WMMA_GFX11
    assert ARCHS["gfx1201"].matrix_unit is MatrixUnit.WMMA_GFX12
    assert ARCHS["gfx1100"].matrix_unit.is_wmma
    assert not ARCHS["gfx942"].matrix_unit.is_wmma
    assert ARCHS["gfx1030"].triton_supported is False
    assert (ARCHS["gfx908"].agprs_unified, ARCHS["gfx90a"].agprs_unified) == (False, True)
    assert ARCHS["gfx1100"].lds_per_cu * ARCHS["gfx1100"].cus_per_wgp == 128 * 1024


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("gfx942:sramecc+:xnack-", "gfx942"),
        ("gfx90a:sramecc+:xnack+", "gfx90a"),
        ("amdgcn-amd-amdhsa--gfx1100", "gfx1100"),
        (" GFX1201 ", "gfx1201"),
        ("sm_90a", "sm_90"),
        ("cpu", "cpu"),
    ],
)
def test_names_are_normalised(given, name):
    assert arch.get(given) is ARCHS[name]


@pytest.mark.parametrize(
    ("name", "vendor"),
    [("gfx1036", Vendor.AMD), ("gfx1250", Vendor.AMD), ("sm_121", Vendor.NVIDIA), ("mps", Vendor.NONE)],
)
def test_an_unknown_architecture_inherits_nothing(name, vendor):
    entry = arch.get(name)
    assert (entry.name, entry.vendor, entry.known) == (name, vendor, False)
    assert figures(entry) == {}
    assert entry.source("wave_size") is None
    assert entry.lds_per_cu is None
    assert entry.vgprs_per_simd(32) is None


def test_an_entry_can_be_a_key_and_travel_to_another_process():
    entry = ARCHS["gfx1100"]
    assert {entry: 1}[copy.deepcopy(entry)] == 1
    assert pickle.loads(pickle.dumps(entry)) == entry
    with pytest.raises(dataclasses.FrozenInstanceError):
        entry.wave_size = 64
    with pytest.raises(TypeError):
        ARCHS["gfx1100"] = entry


def test_importing_is_quick_and_brings_no_torch(tmp_path):
    """The limit is for this package alone (10 ms measured, beside 20 ms for the standard library's dataclasses)."""
    code = (
        "import dataclasses, enum, sys, time, typing; start = time.process_time(); import rocm_sd.arch; "
        "print(time.process_time() - start, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-X", f"pycache_prefix={tmp_path}", "-c", code]
    environment = {"PYTHONPATH": ":".join(sys.path)}
    runs = [subprocess.run(command, env=environment, capture_output=True, text=True, check=True) for _ in range(4)]
    seconds, torch_loaded = zip(*(run.stdout.split() for run in runs), strict=True)
    assert set(torch_loaded) == {"False"}
    assert min(map(float, seconds)) < 0.030


def test_every_gpu_of_the_table_has_a_generation_and_nothing_else_has():
    assert all(arch.generation(entry) is not None for entry in GPUS)
    assert arch.generation(arch.CPU) is None
    assert arch.generation(arch.get("gfx9999")) is None
    assert arch.generation(arch.get("gfx942:sramecc+:xnack-")) == arch.generation(arch.get("sm_90"))
