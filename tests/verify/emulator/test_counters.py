"""Counts against what can be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hand_assembly import kernel

from rocm_sd import arch

pytest.importorskip("tinygrad")
pytest.importorskip("triton")

from rocm_sd.verify.emulator import Buffer, Counters, launch
from rocm_sd.verify.emulator.counters import bank_conflicts, cache_lines

ALL = np.ones((1, 32), np.bool_)
LANE = np.arange(32)[None]

# Each workgroup has its own part of the buffer.
LOAD = """
  s_load_b64 s[4:5], s[0:1], 0x0
  s_mul_i32 s8, s2, {lanes}
  v_add_nc_u32 v9, s8, v0
  v_lshlrev_b32 v9, {shift}, v9
  s_waitcnt lgkmcnt(0)
  global_load_b32 v1, v9, s[4:5]
  s_waitcnt vmcnt(0)
  v_exp_f32 v2, v1
  global_store_b32 v9, v2, s[4:5]
  s_endpgm
"""


def run(shift: int, waves: int = 2, grid: int = 3) -> Counters:
    data = np.zeros(grid * 32 * waves << max(shift - 2, 0), np.uint32)
    return launch(kernel(LOAD.format(shift=shift, lanes=32 * waves), waves=waves), grid, [Buffer(data)])


def test_instructions_by_class_and_by_name():
    counters = run(2)
    assert counters.waves == 6
    assert counters.workgroups == 3
    assert counters.wave_instructions == 6 * 10
    expected = {"smem": 6, "salu": 6, "valu": 12, "wait": 12, "vmem_load": 6, "vmem_store": 6, "trans": 6, "branch": 6}
    assert {name: count for name, count in counters.by_class.items() if count} == expected
    assert counters.by_name["v_exp_f32"] == 6
    assert counters.seconds > 0


@pytest.mark.parametrize(("shift", "efficiency"), [(2, 1.0), (3, 0.5), (7, 1 / 32)])
def test_coalescing(shift, efficiency):
    counters = run(shift)
    assert counters.bytes_loaded == counters.bytes_stored == 6 * 32 * 4
    assert counters.coalescing_efficiency == pytest.approx(efficiency)


def test_cache_lines_of_patterns():
    assert cache_lines(LANE * 4, ALL, 4) == 1
    assert cache_lines(LANE * 4 + 64, ALL, 4) == 2
    assert cache_lines(LANE * 128, ALL, 4) == 32
    assert cache_lines(LANE * 128, LANE < 5, 4) == 5
    assert cache_lines(LANE * 16, ALL, 16) == 4
    assert cache_lines(np.full((1, 32), 124), ALL, 8) == 2
    assert cache_lines(LANE * 4, ~ALL, 4) == 0


def test_bank_conflicts_of_patterns():
    assert bank_conflicts(LANE * 4, ALL, 1) == 0
    assert bank_conflicts(LANE * 0, ALL, 1) == 0  # one word for all lanes is a broadcast
    assert bank_conflicts(LANE * 8, ALL, 1) == 1
    assert bank_conflicts(LANE * 128, ALL, 1) == 31
    assert bank_conflicts(LANE * 128, LANE < 4, 1) == 3
    assert bank_conflicts(LANE * 132, ALL, 1) == 0  # a row of 33 words, the usual padding
    assert bank_conflicts(LANE * 16, ALL, 4) == 0
    assert bank_conflicts(LANE * 128, ALL, 4) == 4 * 7


def test_bank_conflicts_are_counted_for_each_wave():
    text = "v_lshlrev_b32 v9, {}, v0\n ds_store_b32 v9, v0\n s_endpgm"
    counters = launch(kernel(text.format(7), waves=2, lds=8192), 2, [None])
    assert counters.lds_accesses == 4
    assert counters.lds_bank_conflicts == 31 * counters.lds_accesses
    assert launch(kernel(text.format(2), waves=2, lds=8192), 2, [None]).lds_bank_conflicts == 0


def test_matrix_operations():
    text = "v_wmma_f32_16x16x16_f16 v[0:7], v[8:15], v[16:23], v[0:7]\n s_endpgm"
    counters = launch(kernel(text), 2, [None])
    assert counters.matrix_flops == 2 * 2 * 16**3
    assert counters.by_class["matrix"] == 2
    assert 0 < counters.matrix_utilisation() <= 1


def test_the_model_charges_the_busiest_unit():
    gpu = arch.get("gfx1100")
    counters = Counters(gpu, 32)
    counters.by_class["valu"] = 1000
    assert counters.modelled_cycles() == 1000 / gpu.simds_per_cu
    counters.by_class["trans"] = 1000
    assert counters.modelled_cycles() == 5000 / gpu.simds_per_cu
    counters.lds_accesses, counters.lds_bank_conflicts = 1000, 31_000
    assert counters.modelled_cycles() == 32_000
    assert counters.as_dict()["modelled_cycles"] == 32_000


def test_throughput_of_many_waves():
    # Half of the figure asked of the emulator (100,000 wave instructions a second), for slow and busy machines.
    body = "\n".join("v_add_f32 v1, v2, v3\n v_mul_f32 v2, v1, v3\n s_add_i32 s20, s20, 1" for _ in range(100))
    counters = launch(kernel(body + "\n s_endpgm", waves=4), 64, [None])
    assert counters.wave_instructions == 256 * 301
    assert counters.wave_instructions / counters.seconds > 50_000
