from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest

from rocm_sd import arch
from rocm_sd.kernels.config import Config
from rocm_sd.tuning.ranking import Code, CodePart, Program, RatedConfig, model, rank, static_choice

GFX = ["gfx1100", "gfx1201", "gfx942"]
NOTHING = CodePart(0, 0, 0, 0, 0, ())
# A wave loads 4 x 16 bytes a lane, and computes a little, in each turn of its loop.
STREAM = Code(4, 32, 8, 2, CodePart(100, 4, 0, 0, 64, (16, 16, 16, 16)), replace(NOTHING, vector=50), has_loop=True)
STREAMED = Program(loaded=2**20, stored=2**10, dots=(), tensors=2**30)
# 8 products of 16x16x16 in each turn, from LDS that two global loads fill.
DOT_LOOP = CodePart(60, 0, 8 * 2 * 16**3, 96, 32, (16, 16))
DOT = Code(4, 32, 4, 2, DOT_LOOP, replace(NOTHING, vector=200, global_widths=(16,) * 4), has_loop=True)


def dots(m: int, n: int, k: int, count: int) -> Program:
    return Program(2 * (m + n) * k * count, 2 * m * n, ((m, n, k, count),), 2**26)


def for_arch(code: Code, gfx: str) -> Code:
    return replace(code, wave_size=arch.get(gfx).wave_size)


def seconds(gfx: str, workgroups: int, code: Code, program: Program) -> float:
    return model(arch.get(gfx), workgroups, for_arch(code, gfx), program).seconds


@pytest.mark.parametrize("gfx", GFX)
@pytest.mark.parametrize(
    ("code", "program"), [(STREAM, STREAMED), (DOT, dots(64, 64, 32, 40))], ids=["stream", "matrix"]
)
@pytest.mark.parametrize("workgroups", [1, 7, 100, 5000])
def test_more_workgroups_at_once_are_never_slower(gfx, code, program, workgroups):
    times = [seconds(gfx, workgroups, replace(code, resident=resident), program) for resident in (1, 2, 3, 4, 8)]
    assert times == sorted(times, reverse=True)


def test_more_waves_hide_more_of_a_stream():
    few, many = (seconds("gfx1100", 5000, replace(STREAM, resident=resident), STREAMED) for resident in (1, 8))
    assert many < 0.7 * few


@pytest.mark.parametrize("gfx", GFX)
@pytest.mark.parametrize("workgroups", [1, 100, 5000])
def test_wider_loads_are_never_slower(gfx, workgroups):
    times = [
        seconds(
            gfx,
            workgroups,
            replace(STREAM, main=replace(STREAM.main, global_widths=(width,) * (64 // width))),
            STREAMED,
        )
        for width in (2, 4, 8, 16)
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


@pytest.mark.parametrize("gfx", GFX)
def test_a_grid_that_fills_every_unit_beats_one_that_fills_one(gfx):
    units = arch.get(gfx).compute_units
    whole = dots(64, 64, 32, 40 * units)
    spread = dots(64, 64, 32, 40)
    assert seconds(gfx, units, DOT, spread) < 0.1 * seconds(gfx, 1, DOT, whole)


def test_the_last_round_costs_as_much_as_a_full_one():
    units = arch.get("gfx942").compute_units
    program = dots(64, 64, 32, 400)
    full, one_more = (seconds("gfx942", n, replace(DOT, resident=1), program) for n in (units, units + 1))
    assert one_more > 1.6 * full


@pytest.mark.parametrize("gfx", GFX)
def test_one_row_more_than_a_tile_costs_a_whole_tile(gfx):
    """64 rows of each of 3040 products are one tile, 65 are two: the second computes 64 rows for one."""
    exact, padded = (seconds(gfx, tiles * 3040, DOT, dots(64, 64, 32, 90)) for tiles in (1, 2))
    assert padded > 1.5 * exact


def test_sides_are_rounded_up_and_idle_waves_repeat_the_work():
    assert dots(17, 16, 16, 1).matrix_flops(waves=1) == dots(32, 16, 16, 1).matrix_flops(waves=1)
    assert dots(16, 16, 16, 1).matrix_flops(waves=8) == 8 * dots(16, 16, 16, 1).matrix_flops(waves=1)


@pytest.mark.parametrize("field", ["vector", "transcendental", "matrix_flops", "lds_bytes"])
def test_more_instructions_are_never_faster(field):
    heavier = replace(DOT, rest=replace(DOT.rest, **{field: 10_000_000}))
    assert seconds("gfx1100", 300, heavier, dots(64, 64, 32, 40)) > seconds("gfx1100", 300, DOT, dots(64, 64, 32, 40))


def test_prefetching_hides_latency():
    one, two = (seconds("gfx1100", 96, replace(DOT, stages=stages), dots(64, 64, 32, 400)) for stages in (1, 2))
    assert two < one


@pytest.mark.parametrize("gfx", GFX)
def test_no_time_is_below_the_roofline(gfx):
    gpu = arch.get(gfx)
    program = dots(128, 128, 32, 1000)
    flops = 10_000 * 2.0 * 128 * 128 * 32 * 1000
    assert seconds(gfx, 10_000, DOT, program) > flops / (gpu.peak("float16") * 1e12)
    assert seconds(gfx, 10_000, STREAM, STREAMED) > 2**30 / (gpu.bandwidth_gbps * 1e9)


def test_a_figure_that_is_not_known_leaves_its_terms_out_and_says_so():
    no_bandwidth = model(arch.get("gfx1103"), 100, STREAM, STREAMED)
    assert set(no_bandwidth.terms) == {"compute", "latency", "caches"}
    assert no_bandwidth.not_modelled == ("memory: the bandwidth of gfx1103 is not known",)
    nothing = model(arch.unknown("gfx9999"), 100, STREAM, STREAMED)
    assert nothing.terms == {}
    assert len(nothing.not_modelled) == 2
    assert model(arch.get("gfx1100"), 100, STREAM, STREAMED).not_modelled == ()


@dataclass(frozen=True)
class Tile(Config):
    tile: int


def found(tile: int, us: float, **more) -> RatedConfig:
    return RatedConfig(Tile(tile), us, **more)


def test_what_was_dropped_never_wins():
    ranked = rank([found(1, 0.1, dropped="spills: 3 VGPRs"), found(2, 9.0)])
    assert [c.config.tile for c in ranked] == [2]
    assert rank([found(1, 0.1, dropped="lds: too much")]) == []


def test_a_config_that_passes_every_gate_comes_before_a_faster_one():
    assert rank([found(1, 1.0, blemishes=("waves: 2 of 16",)), found(2, 9.0)])[0].config.tile == 2


def test_ties_are_broken_in_the_order_that_is_written_down():
    candidates = [
        found(4, 5.0, figures={"waves_per_simd": 8, "vgprs": 96, "lds": 64}),
        found(3, 5.0, figures={"waves_per_simd": 8, "vgprs": 96, "lds": 0}),
        found(2, 5.0, figures={"waves_per_simd": 8, "vgprs": 64, "lds": 0}),
        found(1, 5.0, figures={"waves_per_simd": 16, "vgprs": 96, "lds": 0}),
        found(6, 5.0, figures={"waves_per_simd": 8, "vgprs": 96, "lds": 64}),
        found(0, 5.0004, figures={"waves_per_simd": 16, "vgprs": 128, "lds": 0}),
    ]
    order = [c.config.tile for c in rank(candidates)]
    assert order == [1, 0, 2, 3, 4, 6]
    assert [c.config.tile for c in rank(reversed(candidates))] == order


def test_the_static_choice_is_valid_in_most_buckets_and_nearest_to_the_best_of_each():
    first = [found(1, 10.0), found(2, 20.0), found(3, 12.0)]
    second = [found(1, 1000.0), found(2, 100.0), found(3, 130.0)]
    chosen, served = static_choice([first, second])
    assert (chosen.config.tile, served) == (3, 2)
    # Nothing is valid everywhere: what serves one bucket is better than nothing.
    chosen, served = static_choice([[found(1, 10.0)], [found(2, 10.0, dropped="spills")]])
    assert (chosen.config.tile, served) == (1, 1)
    assert static_choice([[found(1, 1.0, dropped="spills")], []]) is None


def test_times_are_finite_for_a_kernel_that_does_nothing():
    idle = Code(1, 32, 1, 1, NOTHING, NOTHING, has_loop=False)
    assert math.isfinite(model(arch.get("gfx1100"), 1, idle, Program(0, 0, (), 0)).seconds)
