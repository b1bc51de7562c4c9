"""Real workers and a real database: a model is measured at its first call, once, whatever a candidate does."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from functools import partial

import pytest
import torch

import rocm_sd
from pipelines import tiny_pipeline
from rocm_sd.engine import calibration, optimization
from rocm_sd.engine.calibration import calibrating, plan_times, plans, tracing, trials
from rocm_sd.engine.model_ways import unmeasured
from rocm_sd.ops.registry import forget_choices
from rocm_sd.tuning import environment
from rocm_sd.tuning.resolve import user_database
from rocm_sd.tuning.search.watching import Watched

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
    # Neither of them can be sent to a worker.
    pipe.unet.of_the_user = pipe.vae.decoder.of_the_user = lambda: None
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


def calibrated(make, prepare, monkeypatch, trial_s=5.0):
    monkeypatch.setattr(plan_times, "_TRIAL_S", trial_s)
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
    seen = Watched()
    tracing.trace_call(pipe.unet, (), given, seen)
    assert {each.call.op for each in seen.traced()} >= {"group_norm_silu", "attention", "layer_norm_residual", "geglu"}
    assert {name: p.stride() for name, p in pipe.unet.named_parameters()} == {n: s for n, (_, s) in before.items()}
    assert not any("forward" in module.__dict__ for module in pipe.unet.modules())


def test_a_worker_runs_plans_by_the_engines_own_rules(make):
    unet = make().unet
    take_off = optimization.prepare_plan(unet, calibration.named("channels_last"), "none")
    assert any("forward" in module.__dict__ for module in unet.modules())
    take_off()
    assert not any("forward" in module.__dict__ for module in unet.modules())


def test_two_processes_do_not_measure_one_another(make, monkeypatch):
    monkeypatch.setattr(calibrating, "_WAITS_S", 0.5)
    with plan_times.alone(), pytest.raises(calibration.NotMeasured, match="another process"):
        calibrated(make, wrong, monkeypatch)


def test_what_another_process_measured_meanwhile_is_taken(make, monkeypatch):
    """As ranks do, that begin together: they have one plan, and so the same bits."""
    taken = contextlib.ExitStack()
    taken.enter_context(plan_times.alone())
    heard = []

    def progress(what, _spent, _of):
        if what == "another process measures":
            heard.append(what)
            with monkeypatch.context() as other:
                other.setattr(calibrating, "alone", lambda *_waits: contextlib.nullcontext())
                calibrating.calibrate([subject], CPU, wrong, graphs=True)
            taken.close()

    unet = make().unet
    given = {"sample": torch.randn(2, 4, 8, 8), "timestep": torch.tensor(1), "return_dict": False}
    given["encoder_hidden_states"] = torch.randn(2, 5, unet.config.cross_attention_dim)
    subject = calibration.Subject(unet, (), given)
    monkeypatch.setattr(plan_times, "_TRIAL_S", 5.0)
    done = calibration.calibrate([subject], CPU, wrong, graphs=True, progress=progress)
    assert heard == ["another process measures"]
    assert not done.ops
    assert not done.plans
    assert calibration.measured(subject.key, CPU, graphs=True) is not None


@contextlib.contextmanager
def small_trials(prepare, seconds):
    """An outline of a model that is there in no time, and a worker that is there already, with so many seconds."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    outline = calibration.Outline.of(calibration.Subject(model, (torch.zeros(2, 8),), {}))
    timer = plan_times.PlanTimer(CPU, prepare, plan_times.Clock(1000.0), lambda _: None, graphs=True)
    with timer.started([outline]):
        timer.worker.submit(trials.get_ready, [optimization.__name__, __name__], None, None, timeout=300).result()
        timer.clock.begun, timer.clock.budget_s = time.monotonic(), seconds
        yield timer, outline


def answers_of(timer, outline):
    found = timer._known_wrong(outline)
    timer._add(outline, plan_times._wanted(graphs=True), found)
    return found


def test_a_plan_that_hangs_is_ended_and_costs_itself(monkeypatch):
    monkeypatch.setattr(plan_times, "_TRIAL_S", 4.0)
    with small_trials(hangs, 15.0) as (timer, outline):
        begun = time.monotonic()
        found = answers_of(timer, outline)
        taken = time.monotonic() - begun
    assert taken < 20
    assert "ours" in found["torch"]
    assert found["channels_last"]["wrong"].startswith("hung: stopped after 4 s")
    # The next process knows it, and has time for the others.
    wrong = {"channels_last": found["channels_last"]}
    with contextlib.suppress(calibration.NotMeasured):  # where there was no time for the others
        plan_times._store(outline, CPU, found, graphs=True)
    forget_choices()
    with small_trials(hangs, 60.0) as (timer, outline):
        found = answers_of(timer, outline)
    assert found["channels_last"] == wrong["channels_last"]
    assert all("ours" in found[name] for name in ("torch", "graph", "contiguous"))
    assert "plan channels_last" not in timer.clock.phases


def test_a_plan_whose_time_was_over_is_not_wrong_and_comes_first_the_next_time(monkeypatch):
    monkeypatch.setattr(plan_times, "_TRIAL_S", 1000.0)
    with small_trials(hangs, 4.0) as (timer, outline):
        begun = time.monotonic()
        found = answers_of(timer, outline)
        assert time.monotonic() - begun < 8
    assert "ours" in found["torch"]
    assert found["channels_last"]["cut"].startswith("cut: the time was over")
    # They were not begun.
    assert found["graph"] == found["contiguous"] == {"cut": "cut: 0.0 s were left"}
    which = {"graphs": True, "call": outline.call}
    assert not plans.was_cut(outline.key, CPU, **which)
    with pytest.raises(calibration.NotMeasured, match="its time was over"):
        plan_times._store(outline, CPU, found, graphs=True)
    forget_choices()
    assert calibration.measured(outline.key, CPU, graphs=True) is None
    assert plans.known_wrong(outline.key, CPU, **which) == {}
    assert plans.was_cut(outline.key, CPU, **which)


def test_where_plans_were_cut_the_next_calibration_searches_no_ops(make, monkeypatch):
    monkeypatch.setattr(calibrating, "searches_ops", lambda _device: True)
    monkeypatch.setattr(calibrating, "was_cut", lambda *_args, **_named: True)
    monkeypatch.setattr(calibrating, "Tuner", None)
    done, found, _ = calibrated(make, wrong, monkeypatch)
    assert (done.ops, set(done.phases) & {"tracing", "ops"}) == ([], set())
    assert found is not None


def test_what_was_cut_decides_nothing_and_what_was_wrong_is_kept(make):
    subject = calibration.Outline.of(calibration.Subject(make().unet, (torch.zeros(2, 4, 8, 8),), {}))
    stock, hung = {"ours": [1.0] * 8}, {"wrong": "hung: stopped after 4 s without an answer"}
    with pytest.raises(calibration.NotMeasured, match="its time was over"):
        plan_times._store(subject, CPU, {"torch": stock, "channels_last": hung}, graphs=True)
    forget_choices()
    assert calibration.measured(subject.key, CPU, graphs=True) is None
    known = plans.known_wrong(subject.key, CPU, graphs=True, call=subject.call)
    assert known == {"channels_last": hung["wrong"]}
    # Where each other plan is wrong, stock is what was measured.
    wrong = dict.fromkeys(("graph", "contiguous", "channels_last"), hung)
    plan_times._store(subject, CPU, {"torch": stock, **wrong}, graphs=True)
    assert calibration.measured(subject.key, CPU, graphs=True).plan.name == "torch"


def test_a_librarys_own_search_moves_the_end_and_nothing_else_does():
    clock = plan_times.Clock(10.0)
    with clock.phase("tracing", 0.05):
        time.sleep(0.2)
    with clock.phase("plan channels_last"):
        time.sleep(0.2)
    assert 0.15 <= clock.searched_s <= 0.15 + 5
    assert clock.left == pytest.approx(10.0 + clock.searched_s - clock.spent, abs=0.1)
    assert clock.phases["tracing"] >= 0.2
    assert clock.phases["plan channels_last"] >= 0.2


def test_where_nothing_can_be_kept_nothing_is_measured(make, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "file" / "cache"))
    pipe = make()
    stock = picture(pipe)
    rocm_sd.optimize(pipe)
    begun = time.monotonic()
    for _ in range(2):
        torch.testing.assert_close(picture(pipe), stock, rtol=1e-3, atol=1e-3)
    assert time.monotonic() - begun < 20
    said = [r.message for r in caplog.records if "it cannot be kept" in r.message]
    assert len(said) == 1
    assert "ROCM_SD_CACHE names another folder" in said[0]


def test_measurements_that_vanish_are_not_taken_for_ever(make, monkeypatch):
    """A model that waits for its first picture's plan is not measured at each call, whatever becomes of the file."""
    asked = []

    def lost(subjects, *_args, **_named):
        asked.append(subjects[0].call)
        return calibration.Calibration((), {}, 0.1, interrupted=False)

    monkeypatch.setattr(calibration, "measure_with_progress", lost)
    pipe = rocm_sd.optimize(make())
    picture(pipe)
    picture(pipe)
    assert len(asked) == 2  # the UNet, and its decoder


def test_two_pipelines_that_wait_both_have_what_one_of_them_measured(make, monkeypatch):
    """As a text-to-image and an image-to-image pipeline that are optimised before the first picture."""
    first, second = rocm_sd.optimize(make()), rocm_sd.optimize(make())
    fastest = {"UNet2DConditionModel": "channels_last", "Decoder": "torch"}

    def measure(subjects, device, _prepare, *, graphs):
        for subject in subjects:
            found = {name: {"ours": [1.0 if name == "torch" else 2.0] * 8} for name in ("torch", "channels_last")}
            found[fastest[type(subject.model).__name__]] = {"ours": [0.5] * 8, "stock": [1.0] * 8}
            plan_times._store(calibration.Outline.of(subject), device, found, graphs=graphs)
        forget_choices()
        return calibration.Calibration((), {}, 0.1, interrupted=False)

    monkeypatch.setattr(calibration, "measure_with_progress", measure)
    stock = picture(make())
    for pipe in (first, second):
        assert not rocm_sd.report(pipe).replaced
        torch.testing.assert_close(picture(pipe), stock, rtol=1e-3, atol=1e-3)
        assert any(change.path.startswith("unet") for change in rocm_sd.report(pipe).replaced)
        assert "UNet2DConditionModel: 2.00 times stock" in " ".join(rocm_sd.report(pipe).notes)


def test_a_pipeline_that_waits_runs_as_shipped_once_another_could_not_be_measured(make, monkeypatch):
    first, second = rocm_sd.optimize(make()), rocm_sd.optimize(make())

    def measure(*_args, **_named):
        raise calibration.NotMeasured("its time was over")

    monkeypatch.setattr(calibration, "measure_with_progress", measure)
    for pipe in (first, second):
        assert not rocm_sd.report(pipe).replaced
        picture(pipe)
        assert any(change.path.startswith("unet") for change in rocm_sd.report(pipe).replaced)


def test_a_group_offload_has_its_weights_brought_while_a_call_is_traced(make):
    unet = make().unet
    given = {"sample": torch.randn(2, 4, 8, 8), "timestep": torch.tensor(1), "return_dict": False}
    given["encoder_hidden_states"] = torch.randn(2, 5, unet.config.cross_attention_dim)
    unet.enable_group_offload(CPU, offload_type="block_level", num_blocks_per_group=1)
    hook, done = unet._diffusers_hook.hooks["group_offloading"], []

    def noted(name, before):
        return lambda *args, **kwargs: done.append(name) or before(*args, **kwargs)

    hook.pre_forward, hook.post_forward = (noted(n, getattr(hook, n)) for n in ("pre_forward", "post_forward"))
    seconds = tracing.trace_call(unet, (), given, Watched())
    assert done == ["pre_forward", "post_forward"]
    assert seconds > 0


def test_ctrl_c_stops_what_compiles_beside(monkeypatch):
    """The thread is waited for: it must end at once, and not with its share of the budget."""
    precompile = pytest.importorskip("rocm_sd.kernels.triton.precompile")
    monkeypatch.setattr(precompile, "start", lambda: None)
    monkeypatch.setattr(precompile, "_ask", lambda _question: time.sleep(0.2) or precompile.Answer(precompile.HERE))
    stopped = threading.Event()
    threading.Timer(0.5, stopped.set).start()
    begun, answers = time.monotonic(), []
    precompile.compile_variants([{}] * 1000, 60.0, 0, stopped=stopped, on_answer=lambda *each: answers.append(each))
    assert time.monotonic() - begun < 10
    assert 0 < len(answers) < 1000
    assert not any(compiled for _, compiled in answers)


@pytest.mark.parametrize(("free", "kept"), [(2**40, 2), (None, 2), (0, 1)])
def test_a_worker_keeps_the_models_that_there_is_room_for(free, kept, monkeypatch):
    monkeypatch.setattr(trials, "_kept", {})
    monkeypatch.setattr(trials, "free_memory", lambda _device: free)
    for width in (8, 16):
        model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU())
        skeleton = calibration.Skeleton.of(model, (torch.zeros(2, 8),), {})
        pair = trials._opened(skeleton, CPU)
        assert trials._opened(skeleton, CPU) is pair
        assert (pair.stock is None) == (free == 0)
    assert len(trials._kept) == kept


def test_what_decides_most_is_timed_of_each_model_before_all_else(monkeypatch):
    asked = []
    with small_trials(wrong, 1000.0) as (timer, outline):
        monkeypatch.setattr(
            plan_times.PlanTimer, "_one",
            lambda _self, one, plan, *_: asked.append((one.key, plan.name)) or {"ours": [1.0] * 8},
        )  # fmt: skip
        timer._ready[0].result()
        other = dataclasses.replace(outline, key="other")
        found, left_out = timer.all([outline, other])
    both = (outline.key, "other")
    first = [(key, plan) for key in both for plan in ("torch", "channels_last")]
    assert asked == [*first, *((key, plan) for key in both for plan in ("contiguous", "graph"))]
    assert len(found) == 8
    assert not left_out
