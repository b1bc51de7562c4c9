"""Real workers and a real database: a model is measured at its first call, once, whatever a candidate does."""

from __future__ import annotations

import logging
import os
import time
from functools import partial

import pytest
import torch

import rocm_sd
from pipelines import tiny_pipeline
from rocm_sd.engine import calibration, optimization
from rocm_sd.engine.calibration import calibrating
from rocm_sd.engine.model_ways import unmeasured
from rocm_sd.ops.registry import forget_choices
from rocm_sd.tuning import environment
from rocm_sd.tuning.resolve import user_database

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ROCM_SD_CALIBRATE", "1")
    monkeypatch.setenv("ROCM_SD_STEP_GRAPH", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    # On a busy host the workers alone may take as long as a user is asked to wait.
    monkeypatch.setattr(calibrating, "BUDGET_S", 300.0)
    forget_choices()
    unmeasured.clear()
    yield tmp_path
    forget_choices()
    unmeasured.clear()


@pytest.fixture
def make(tmp_path):
    return partial(tiny_pipeline, tmp_path)


def picture(pipe):
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    return pipe("a cat", num_inference_steps=2, latents=latents, output_type="pt").images


def test_a_first_picture_is_measured_and_the_next_process_finds_it(make, monkeypatch, caplog):
    pipe = make()
    stock = picture(pipe)
    with caplog.at_level(logging.WARNING, "rocm_sd"):
        rocm_sd.optimize(pipe)
        assert "UNet2DConditionModel runs as it came until its first picture is measured" in rocm_sd.report(pipe).notes
        torch.testing.assert_close(picture(pipe), stock, rtol=1e-3, atol=1e-3)
    assert [
        r.message for r in caplog.records if "measuring your card for UNet2DConditionModel and Decoder" in r.message
    ]
    stored = user_database().all("plan", environment.current(CPU))
    by_model = {entry.problem["model"].split()[0]: set() for entry in stored}
    for entry in stored:
        by_model[entry.problem["model"].split()[0]].add(entry.candidate)
    assert by_model.keys() == {"UNet2DConditionModel", "Decoder"}
    assert all({"torch", "graph", "channels_last"} <= names for names in by_model.values())
    assert "measured here on" in " ".join(rocm_sd.report(pipe).notes)

    # In the next process nothing is measured, and the picture is stock's.
    def never(*_args, **_named):
        raise AssertionError("measured again")

    monkeypatch.setattr(calibration, "measure_with_progress", never)
    again = make()
    rocm_sd.optimize(again)
    torch.testing.assert_close(picture(again), stock, rtol=1e-3, atol=1e-3)
    assert "measured here on" in " ".join(rocm_sd.report(again).notes)
    rocm_sd.restore(again)
    assert torch.equal(picture(again), stock)


def test_switched_off_nothing_is_measured(make, monkeypatch, cache):
    monkeypatch.setenv("ROCM_SD_CALIBRATE", "0")
    pipe = rocm_sd.optimize(make())
    picture(pipe)
    assert not (cache / "cache" / "tuning.sqlite3").exists() or not user_database().all("plan")


def test_what_cannot_be_measured_runs_as_the_data_say(make, caplog):
    pipe = make()
    stock = picture(pipe)
    pipe.unet.of_the_user = lambda: None
    rocm_sd.optimize(pipe)
    with caplog.at_level(logging.WARNING, "rocm_sd"):
        torch.testing.assert_close(picture(pipe), stock, rtol=1e-3, atol=1e-3)
    assert "runs as the shipped data say: it cannot be rebuilt" in caplog.text
    # The layout of a CPU's data: its rules are in place for this model.
    assert any(change.replaced and change.path.startswith("unet") for change in rocm_sd.report(pipe).changes)


def test_an_interrupt_stops_the_picture_and_keeps_what_was_measured(make, monkeypatch):
    pipe = rocm_sd.optimize(make())

    def interrupted(subjects, *_args, **_named):
        return calibration.Calibration((), {}, 0.1, interrupted=True)

    monkeypatch.setattr(calibration, "measure_with_progress", interrupted)
    with pytest.raises(KeyboardInterrupt):
        picture(pipe)
    monkeypatch.undo()
    assert isinstance(picture(pipe), torch.Tensor)


def dies(_model, _plan, _mode):
    os.abort()


def hangs(_model, plan, _mode):
    if plan.name == "channels_last":
        time.sleep(1000)
    return lambda: None


def wrong(model, plan, _mode):
    before = model.conv_out.bias.detach().clone()
    if plan.name == "channels_last":
        model.conv_out.bias.data += 10.0

    def take_off():
        model.conv_out.bias.data.copy_(before)

    return take_off


def calibrated(make, prepare, monkeypatch):
    monkeypatch.setattr(calibrating, "_TRIAL_S", 5.0)
    pipe = make()
    given = {"sample": torch.randn(2, 4, 8, 8), "timestep": torch.tensor(1), "return_dict": False}
    given["encoder_hidden_states"] = torch.randn(2, 5, pipe.unet.config.cross_attention_dim)
    subject = calibration.Subject(pipe.unet, (), given)
    done = calibration.calibrate([subject], CPU, prepare, graphs=True)
    found = calibration.measured(subject.key, CPU, graphs=True)
    return done, found, {entry.candidate: entry.numerics for entry in user_database().all("plan")}


@pytest.mark.parametrize(
    ("prepare", "reason"), [(hangs, "hung"), (wrong, "differs from stock's"), (dies, "crashed by signal 6")]
)
def test_a_plan_that_hangs_is_wrong_or_dies_is_not_taken(make, prepare, reason, monkeypatch):
    begun = time.monotonic()
    done, found, numerics = calibrated(make, prepare, monkeypatch)
    assert reason in numerics["channels_last"]
    assert numerics["torch"] == "ok"
    assert found.plan.name != "channels_last"
    assert not done.interrupted
    assert time.monotonic() - begun < 120


def test_tracing_leaves_the_model_as_it_was(make):
    pipe = make()
    before = {name: (p.data_ptr(), p.stride()) for name, p in pipe.unet.named_parameters()}
    given = {"sample": torch.randn(2, 4, 8, 8), "timestep": torch.tensor(1), "return_dict": False}
    given["encoder_hidden_states"] = torch.randn(2, 5, pipe.unet.config.cross_attention_dim)
    seen = calibrating.Watched()
    calibrating.trace_call(pipe.unet, (), given, seen)
    assert {each.call.op for each in seen.traced()} >= {
        "conv2d",
        "group_norm_silu",
        "attention",
        "layer_norm_residual",
    } or seen.traced()
    assert {name: p.stride() for name, p in pipe.unet.named_parameters()} == {n: s for n, (_, s) in before.items()}
    assert not any("forward" in module.__dict__ for module in pipe.unet.modules())


def test_a_worker_runs_plans_by_the_engines_own_rules(make):
    unet = make().unet
    take_off = optimization.prepare_plan(unet, calibration.named("channels_last"), "none")
    assert any("forward" in module.__dict__ for module in unet.modules())
    take_off()
    assert not any("forward" in module.__dict__ for module in unet.modules())


def test_two_processes_do_not_measure_one_another(make, monkeypatch):
    with calibrating._alone(), pytest.raises(calibration.NotMeasured, match="another process"):
        calibrated(make, wrong, monkeypatch)
