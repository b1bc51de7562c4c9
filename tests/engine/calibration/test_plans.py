"""Which plan was the fastest here, by what the database has."""

from __future__ import annotations

import pytest
import torch

from rocm_sd.engine.calibration import plans
from rocm_sd.ops.registry import forget_choices
from rocm_sd.tuning import environment
from rocm_sd.tuning.entries import Entry
from rocm_sd.tuning.resolve import user_database

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path))
    forget_choices()
    yield tmp_path
    forget_choices()


def put(
    plan,
    us,
    *,
    call="2x4x8x8 float16",
    stock=1000.0,
    numerics="ok",
    when="2026-11-01T00:00:00",
    graphs=True,
    kernels=None,
):
    problem = plans.problem_of("a model", call, graphs=graphs)
    known = plans.kernels_hash() if kernels is None else kernels
    here = environment.current(CPU)
    user_database().put(
        [Entry("plan", problem, here, known, plan, {}, us, 0.98 * us, 1.02 * us, stock, numerics, when)]
    )
    forget_choices()


def found(**given):
    return plans.measured("a model", CPU, graphs=given.pop("graphs", True), **given)


def test_without_a_database_none_is_made(cache):
    assert found() is None
    assert not list(cache.iterdir())


def test_the_fastest_is_taken_and_said():
    for plan, us in (("torch", 1000.0), ("graph", 600.0), ("contiguous", 500.0), ("channels_last", 250.0)):
        put(plan, us)
    best = found()
    assert best.plan.name == "channels_last"
    assert str(best) == "4.00 times stock (0.25 ms a call instead of 1), measured here on 2026-11-01"


def test_one_that_is_not_faster_beyond_doubt_stands_back():
    put("torch", 1000.0)
    put("channels_last", 990.0)
    assert found().plan.name == "torch"
    assert "stock torch is the fastest here" in str(found())


def test_a_wrong_one_is_never_taken():
    put("torch", 1000.0)
    put("channels_last", 100.0, numerics="its result is 0.1 of its norm from stock's")
    assert found().plan.name == "torch"


def test_other_kernels_modes_models_and_shapes_are_others():
    put("channels_last", 100.0, kernels="of another release")
    assert found() is None
    put("channels_last", 100.0, graphs=False)
    assert found() is None
    assert found(graphs=False).plan.name == "channels_last"
    put("contiguous", 100.0)
    assert found(call="2x4x16x16 float16") is None
    assert plans.measured("another model", CPU, graphs=True) is None


def test_without_shapes_the_newest_decide():
    put("contiguous", 100.0, call="small", when="2026-11-01T00:00:00")
    put("channels_last", 100.0, call="large", when="2026-11-02T00:00:00")
    assert found().plan.name == "channels_last"
    assert found(call="small").plan.name == "contiguous"


def test_a_plan_of_another_release_is_passed_over():
    put("a plan that this version does not have", 1.0)
    assert found() is None
