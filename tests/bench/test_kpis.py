"""Percent of published figures: which fit, what differs, and which one decides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rocm_sd import arch
from rocm_sd.bench import kpis
from rocm_sd.bench.records import Machine, Measurement, Record, WorkloadFacts


def record(name="gfx1100", *, model="sd15", side=512, steps=50, ms=1000.0, batch=1, dtype="float16") -> Record:
    workload = WorkloadFacts(f"{model}-{side}", model, "random", side, side, steps, "DDIMScheduler", 7.5, dtype)
    machine = Machine("a card", name, None, None, None, "Linux", {"torch": "2.11.0"})
    measured = Measurement("rocm-sd", "0.1.0", "triton", batch, (ms,) * 5, steps)
    return Record("engines", workload, machine, "rocm-sd bench", "2026-11-15T12:00:00", (measured,))


def test_every_figure_has_a_source_and_a_unit_that_is_understood():
    for figure in kpis.baselines():
        assert figure.source.startswith("https://")
        assert figure.unit in {"it/s", "s/picture", "s/batch", "pictures/s"}
        assert figure.result > 0
        assert 2022 <= figure.year <= 2026
        assert arch.get(figure.arch).known
        assert figure.software
    keys = [(f.model, f.height, f.steps, f.hardware, f.software, f.engine, f.batch, f.source) for f in kpis.baselines()]
    assert len(keys) == len(set(keys))


def test_the_targets_are_those_of_the_founding_documents():
    assert kpis.target_for("gfx1100").percent == 80
    assert kpis.target_for("gfx1100").hardware == ("RTX 4090",)
    assert kpis.target_for("gfx942").percent == 90
    assert kpis.target_for("gfx1030").percent == 70
    assert kpis.target_for("gfx1201") is None
    assert kpis.target_for("sm_90") is None
    assert kpis.target_for("gfx9999") is None


def test_percent_is_ours_over_theirs_in_steps_a_second():
    found = kpis.kpis(record(ms=1000.0))
    ait = next(k for k in found if k.baseline.hardware == "RTX 4090" and k.baseline.engine == "AITemplate")
    assert ait.ours == pytest.approx(50.0)
    assert ait.percent == pytest.approx(100 * 50 / 65.7)
    assert ait.target == 80
    assert ait.reached is False
    tensorrt = next(k for k in kpis.kpis(record("sm_80", ms=1000.0)) if k.baseline.engine == "TensorRT")
    assert tensorrt.percent == pytest.approx(100 * 50 / (50 / 0.818))
    assert tensorrt.target is None
    assert tensorrt.reached is None


def test_the_fastest_published_figure_decides():
    # 40 it/s are more than 80% of eager's and compile's on an RTX 4090, and less than 80% of AITemplate's.
    found = kpis.kpis(record(ms=1250.0))
    assert any(k.reached for k in found)
    assert [k.baseline.engine for k in found if k.hardest] == ["AITemplate"]
    assert [k.reached for k in found if k.hardest] == [False]
    assert [k.reached for k in kpis.kpis(record(ms=900.0)) if k.hardest] == [True]
    assert [k for k in kpis.kpis(record("sm_90")) if k.hardest] == []


def test_other_models_sizes_and_batches_are_not_compared():
    assert kpis.kpis(record(side=768)) == ()
    assert kpis.kpis(record(model="sd15, tiny")) == ()
    assert kpis.kpis(replace(record(), kind="op")) == ()
    eight = kpis.kpis(record("gfx90a", batch=8, ms=12_500.0))
    assert {k.baseline.hardware for k in eight} == {"MI250X, one of two dies"}
    onnx = next(k for k in eight if k.baseline.engine == "ONNX Runtime")
    assert onnx.percent == pytest.approx(100.0)


@pytest.mark.parametrize("name", ["sm_90", "gfx942", "gfx1100", "gfx1151", "sm_89"])
def test_a_card_is_compared_with_its_own_class_alone(name):
    found = kpis.kpis(record(name))
    assert found
    assert {arch.get(k.baseline.arch).datacenter for k in found} == {arch.get(name).datacenter}
    radeons = [k.baseline.hardware for k in found if k.baseline.hardware.startswith(("RX", "RTX"))]
    assert bool(radeons) == (name not in {"sm_90", "gfx942"})
    assert {arch.generation(arch.get(k.baseline.arch)) for k in found} == {arch.generation(arch.get(name))}


def test_a_card_is_not_compared_with_one_of_the_generation_before():
    hopper = {k.baseline.hardware for k in kpis.kpis(record("sm_90"))}
    assert "H100" in hopper
    assert not [name for name in hopper if name.startswith(("MI100", "MI250", "A100"))]
    assert not kpis.same_class("sm_90", "gfx908")
    assert not kpis.same_class("gfx1100", "sm_86")
    assert kpis.same_class("gfx90a", "sm_80")
    assert kpis.same_class("gfx942", "sm_90")
    assert kpis.same_class("gfx1100", "sm_89")


def test_a_card_of_no_known_class_is_compared_with_none():
    assert kpis.kpis(record("gfx9999")) == ()
    assert kpis.kpis(record("cpu")) == ()


def test_every_target_names_cards_of_the_class_that_it_is_for():
    by_family = {known.family: known.name for known in arch.ARCHS.values()}
    for target in kpis.targets():
        theirs = {figure.arch for figure in kpis.baselines() if figure.hardware in target.hardware}
        ours = {by_family[family] for family in target.families if family in by_family}
        assert theirs
        assert ours
        assert all(kpis.same_class(one, other) for one in ours for other in theirs)


def test_throughput_is_compared_only_for_as_many_steps():
    def units(steps):
        return {k.unit for k in kpis.kpis(record("gfx942", model="sdxl", side=1024, steps=steps, batch=4))}

    assert units(20) == {"pictures/s"}
    assert units(30) == set()


def test_what_differs_is_named():
    found = kpis.kpis(record("sm_80", dtype="bfloat16", steps=20))
    fal = next(k for k in found if k.baseline.engine == "TensorRT")
    words = "; ".join(fal.differences)
    assert "50 steps there, 20 here" in words
    assert "float16 there, bfloat16 here" in words
    assert "TensorRT 9.0, graphs, static shapes of 2024 there, rocm-sd 0.1.0 of 2026 here" in words
    assert "random weights here" in words
    desktop = kpis.kpis(record(dtype="bfloat16", steps=20))
    loop = next(k for k in desktop if k.baseline.engine == "AITemplate" and k.baseline.hardware == "RTX 4090")
    assert "the denoising loop alone there" in "; ".join(loop.differences)
    assert all(k.differences for k in found)
    named = replace(record().measurements[0], version="rocm-sd 0.1.0")
    again = kpis.kpis(replace(record(), measurements=(named,)))
    assert "rocm-sd rocm-sd" not in str(again[0].differences)


def test_what_was_not_timed_is_not_compared():
    one = record()
    left = replace(one.measurements[0], ms=(), left_out="wrong result")
    assert kpis.kpis(replace(one, measurements=(left,))) == ()


def test_the_table_has_a_cell_for_every_heading():
    headings, rows = kpis.table(kpis.kpis(record()))
    assert rows
    assert all(len(row) == len(headings) for row in rows)
    assert any("not reached (decides)" in row[7] for row in rows)
