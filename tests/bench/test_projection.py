"""Modelled times: what is counted, how it is fitted and carried over, and that nothing passes for measured."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import benchmarks_page
import projection_data
import work_items
from rocm_sd import arch
from rocm_sd.bench import architectures, projection
from rocm_sd.bench.workloads import WORKLOADS
from rocm_sd.errors import InvalidOption, Unsupported

ROOT = Path(__file__).parents[2]
H200 = arch.get("sm_90")


@pytest.fixture(scope="module")
def sd15() -> tuple[projection.WorkItem, ...]:
    return work_items.count("sd15-512")


def test_the_calls_are_those_that_a_profile_of_the_engine_shows():
    """benchmarks/engine-h200/profile-sdxl-b1.txt is of four steps and one decode."""
    counted: Counter[str] = Counter()
    for item in work_items.count("sdxl-mlperf"):
        if item.part == "step":
            counted[item.op] += item.count
    profile: Counter[str] = Counter()
    for line in (ROOT / "benchmarks/engine-h200/profile-sdxl-b1.txt").read_text().splitlines():
        if not line.startswith("#"):
            _, calls, _, name = line.split(maxsplit=3)
            profile[name] += int(calls)
    library = next(calls for name, calls in profile.items() if "_sdpa_" in name)
    assert 4 * (counted["layer_norm_residual"] + counted["layer_norm"]) == profile["_layer_norm_residual"]
    assert 4 * counted["linear_geglu"] == profile["_linear_geglu"] + profile["_geglu"]
    assert 4 * counted["attention"] == profile["_attend"] + library


def test_no_more_is_counted_than_stock_computes_and_only_enlargements_need_less(sd15):
    recipe = WORKLOADS["sd15-512"]
    pipe = architectures.random_pipeline("sd15", "ddim", "epsilon", torch.device("meta"), torch.float16)
    stock = architectures.picture_flops(pipe, recipe.side, recipe.side, 1, guided=True)
    # Four 2x2 convolutions in place of one 3x3 on four times the pixels.
    saved = sum(i.count * i.flops * (2.25 - 1) for i in sd15 if i.op == "upsample_conv2d")
    products = {"conv2d", "linear_residual", "linear_geglu", "attention", "upsample_conv2d"}
    ours = sum(i.count * i.flops for i in sd15 if i.op in products)
    assert ours < stock
    assert ours + saved == pytest.approx(stock, rel=0.005)


def test_the_packaged_data_is_what_the_records_and_the_architecture_say(sd15):
    data = json.loads((ROOT / "src/rocm_sd/bench/data/work.json").read_text())
    calls = projection_data.timed_calls(ROOT / "benchmarks/ops-h200")
    assert data["timed"] == [[op, flops, moved, us] for op, _, flops, moved, us in calls], (
        "type: python tools/projection_data.py"
    )
    packaged = [{k: v for k, v in item.items() if k != "us"} for item in data["workloads"]["sd15-512"]["items"]]
    counted = [
        {"part": i.part, "op": i.op, "problem": dict(i.problem), "count": i.count, "flops": i.flops, "bytes": i.bytes}
        for i in sd15
    ]
    assert packaged == counted
    for name, workload in data["workloads"].items():
        recorded = {k: v for k, v in workload["picture"].items() if k != "items"}
        assert recorded == projection_data.picture(name, ROOT / "benchmarks")


def test_a_fit_finds_the_fixed_cost_and_the_share_that_made_the_timings():
    rows = [(0.0, moved, 5.0 + moved / 4800e9 * 1e6 / 0.8) for moved in (1e6, 1e7, 1e8, 1e9)]
    found = projection.fit(H200, rows)
    assert found.fixed_us == pytest.approx(5.0)
    assert found.share == pytest.approx(0.8)
    assert found.calls == 4


def test_a_fit_has_no_negative_fixed_cost():
    rows = [(0.0, 1e8, 10.0), (0.0, 2e8, 100.0)]
    assert projection.fit(H200, rows).fixed_us == 0.0
    assert projection.fit(H200, [(0.0, 1e8, 50.0)]).fixed_us == 0.0
    with pytest.raises(Unsupported, match="no call was timed"):
        projection.fit(H200, [])


def item(**changes) -> projection.WorkItem:
    made = projection.WorkItem("step", "layout_copy", {"n": 1, "c": 3, "hw": 4, "dtype": "float16"}, 1, 0.0, 1e9, None)
    return replace(made, **changes)


def test_a_call_is_carried_over_by_the_rooflines_of_the_two_cards():
    families = {"layout_copy": projection.Fit(4.0, 0.5, 3)}
    by_family = projection.project_items([item()], 10, "sm_90", "gfx1100", families)
    assert by_family.step_ms == pytest.approx((4.0 + 1e9 / 960e9 * 1e6 / 0.5) / 1e3)
    assert by_family.ms == pytest.approx(10 * by_family.step_ms)
    # Timed at twice what the family's share says: the rest, but not the fixed cost, is twice as long there as well.
    timed = projection.project_items([item(us=4.0 + 4 * 1e9 / 4800e9 * 1e6)], 10, "sm_90", "gfx1100", families)
    assert timed.step_ms == pytest.approx((4.0 + 4 * 1e9 / 960e9 * 1e6) / 1e3)
    assert (by_family.timed_share, timed.timed_share) == (0.0, 1.0)


def test_on_the_card_that_was_timed_a_timed_call_takes_what_it_took():
    families = {"layout_copy": projection.Fit(4.0, 0.5, 3)}
    assert projection.project_items([item(us=123.0)], 1, "sm_90", "sm_90", families).ms == pytest.approx(0.123)


def test_too_few_waves_make_a_call_slower(monkeypatch):
    families = {"layout_copy": projection.Fit(0.0, 1.0, 3)}
    full = projection.project_items([item()], 1, "sm_90", "gfx1100", families)
    # 960 GB/s times 600 ns in loads of 16 bytes on 96 x 2 SIMDs of 32 lanes: 5.86 waves are needed.
    monkeypatch.setattr(projection, "_waves", lambda *_: 3)
    starved = projection.project_items([item()], 1, "sm_90", "gfx1100", families)
    assert starved.ms / full.ms == pytest.approx(960e9 * 6e-7 / (96 * 2 * 32 * 16) / 3)
    assert starved.derated == ("layout_copy to 51%",)
    assert full.derated == ()


def test_waves_come_from_the_compiler_and_only_for_our_kernels():
    norm = (("n", 2), ("c", 320), ("hw", 4096), ("groups", 32), ("dtype", "float16"))
    assert (projection._waves("gfx1100", "group_norm_silu", norm) or 0) >= 1
    conv = (("pixels", 8192), ("cin", 320), ("cout", 320), ("kernel", 3), ("stride", 1), ("padding", 1),
            ("dtype", "float16"))  # fmt: skip
    # Untimed, convolutions run in the vendor's library there, whose occupancy nobody knows.
    assert projection._waves("gfx1100", "conv2d", conv) is None
    assert projection._waves("sm_90", "no such op", norm) is None


def test_everything_that_comes_out_says_that_it_is_modelled():
    made = projection.projections()
    assert {p.arch for p in made} == {"gfx942", "gfx1100", "gfx1200", "gfx1201"}
    assert all(p.label == "modelled" for p in made)
    headings, _, *rows = benchmarks_page.TABLES["projections"]().splitlines()
    assert len(rows) == len(made)
    assert all("| **modelled** |" in row for row in rows)
    assert all(row.count("|") == headings.count("|") for row in rows)
    plain = projection.rows("sd15-512")
    assert json.loads(json.dumps(plain)) == plain
    assert all(row["label"] == "modelled" and row["model_error"] for row in plain)


def test_a_projection_stays_above_what_the_arithmetic_takes():
    for made in projection.projections():
        target = arch.get(made.arch)
        items = projection._items(made.workload)
        flops = sum(i.count * i.flops * (made.steps if i.part == "step" else 1) for i in items)
        assert made.ms > flops / (target.peak("float16") or 1) / 1e12 * 1e3


def test_a_counted_launch_takes_its_roofline_or_its_instructions():
    families = {"conv2d": projection.Fit(4.0, 0.5, 3)}
    moves = projection.CountedCall("step", "conv2d", True, 2, 96, 0.0, 0.0, 1e9, 16)
    made = projection.project_counted([moves], 10, "gfx1100", families)
    assert made.step_ms == pytest.approx(2 * (4.0 + 1e9 / 960e9 * 1e6 / 0.5) / 1e3)
    assert made.ms == pytest.approx(10 * made.step_ms)
    # 96 CUs share the cycles of 96 workgroups evenly, at the clock of the table's peak.
    issues = replace(moves, cycles=96e7, bytes=1.0)
    clock = 122.8e12 / (512 * 96)
    assert projection.project_counted([issues], 1, "gfx1100", families).step_ms == pytest.approx(
        2 * (4.0 + 1e7 / clock * 1e6) / 1e3, rel=0.01
    )
    starved = projection.project_counted([replace(moves, waves=3)], 1, "gfx1100", families)
    assert starved.derated == ("conv2d to 51%",)
    stocks = replace(moves, ours=False, waves=0)
    assert projection.project_counted([stocks], 1, "gfx1100", families).step_ms == pytest.approx(made.step_ms)


def test_counts_are_there_for_every_card_that_is_emulated_and_say_their_plan():
    for workload in ("sd15-512", "sdxl-mlperf"):
        for gfx in ("gfx942", "gfx1100", "gfx1201"):
            shipped, every = (projection.counted(workload, gfx, plan) for plan in projection.COUNTED_PLANS)
            assert {"step", "decode"} == {call.part for call in shipped} == {call.part for call in every}
            ours = {call.op for call in every if call.ours}
            assert {"attention", "conv2d", "group_norm_silu", "linear_residual"} <= ours
            # Untimed, convolutions, attention and products are the library's, and nothing is fused with them.
            assert {call.op for call in shipped if call.ours} == {"geglu", "layer_norm_residual"}
            assert projection.project(workload, gfx, "shipped").plan == "shipped"
    assert projection.counted("sd15-512", "gfx1200", "every") == projection.counted("sd15-512", "gfx1201", "every")
    assert projection.project("sd15-512", "gfx1030").plan == projection.ESTIMATED
    with pytest.raises(InvalidOption, match="shipped"):
        projection.project("sd15-512", "gfx1100", "none")


def test_no_less_is_counted_than_convolutions_must_compute():
    """Tiles make it more: on gfx942 one of 128 + 32 channels takes as many products as one of 256, which is 1.6 times.
    Those of a point may be products there, and an enlargement that is convolved whole computes 2.25 times as much.
    """
    items = [each for each in projection._items("sd15-512") if each.part == "step" and "conv2d" in each.op]
    whole = sum(each.count * each.flops for each in items)
    least = sum(each.count * each.flops for each in items if each.problem.get("kernel", 3) == 3)
    for gfx in ("gfx942", "gfx1100", "gfx1201"):
        calls = [call for call in projection.counted("sd15-512", gfx, "every") if call.part == "step"]
        found = sum(call.count * call.flops for call in calls if "conv2d" in call.op)
        assert 0.99 * least < found < 2.0 * whole


def test_the_error_is_that_of_the_recorded_picture():
    found = projection.deviation("sd15-512")
    assert found is not None
    picture = projection._workload("sd15-512")["picture"]
    assert found.measured_ms == picture["ms"]
    # What it is used for has to be of some use: a third at most, on the card that it knows.
    assert max(map(abs, (found.as_used, found.without_shapes, found.without_ops))) < 34
    items, families = projection._items("sd15-512"), projection.fits()
    by_items = projection.project_items(items, 50, "sm_90", "sm_90", families).ms
    assert found.as_used == pytest.approx(100 * (by_items / picture["ms"] - 1), abs=1.0)
    assert projection.project("sdxl-mlperf", "gfx942").model_error


def test_an_unknown_workload_or_card_is_refused_in_words():
    with pytest.raises(InvalidOption, match="sd15-512"):
        projection.project("sd99", "gfx1100")
    with pytest.raises(Unsupported, match="bandwidth is not known"):
        projection.project("sd15-512", "gfx1103")


def test_cards_that_the_model_never_saw_stand_beside_figures_of_the_same_product():
    found = list(benchmarks_page.elsewhere())
    assert found
    for modelled, published in found:
        assert modelled.arch == published.arch != "sm_90"
        assert modelled.workload.startswith(published.model)
    assert "H100" not in {published.hardware for _, published in found}


def test_the_tables_of_the_benchmark_pages_are_what_the_records_say():
    assert [str(path.name) for path in benchmarks_page.stale()] == [], "type: python tools/benchmarks_page.py"
    placed = "".join((ROOT / name).read_text() for name in benchmarks_page.DOCUMENTS)
    assert all(f"<!-- table: {name} -->" in placed for name in benchmarks_page.TABLES)
