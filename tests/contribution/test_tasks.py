"""What the processes of a contribution run, on this machine's own device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rocm_sd.bench import runner, submission, workloads
from rocm_sd.bench.card_report import FAILED, PASSED, SKIPPED
from rocm_sd.bench.machine import machine
from rocm_sd.bench.records import Comparison, Measurement, Record, now
from rocm_sd.contribution import attempts, on_host, tasks
from rocm_sd.contribution.attempts import attempt
from rocm_sd.doctor import examination
from rocm_sd.doctor.check import Check, Finding, Fix, fine, not_here, problem, unknown
from rocm_sd.ops import OPS, self_test
from rocm_sd.verify import on_card

CPU = torch.device("cpu")


@pytest.fixture
def tried(tmp_path):
    return lambda work, *arguments, seconds=600.0: attempt(str(tmp_path), seconds, "unit", work, *arguments)


def test_the_device_is_looked_at_with_all_that_runs_on_it():
    looked = tasks.look("cpu")
    assert (looked.name, looked.machine.arch, looked.dtype) == ("cpu", "cpu", "float32")
    assert ("conv2d", "torch") in looked.implementations
    assert {op for op, _ in looked.implementations} == {op.name for op in OPS.values() if op.verification}
    assert looked.free
    assert looked.kernels


def test_a_kernel_is_tested_as_before_its_first_use(tried, monkeypatch):
    (item,) = tried(tasks.self_test_of, "linear_residual", "addmm", "float32", "cpu").items
    assert (item.name, item.state, item.figures["dtype"]) == ("linear_residual addmm", PASSED, "float32")
    bad = self_test.SelfTestVerdict("failed", "at 2x3: NaN")
    monkeypatch.setattr(self_test, "verdict", lambda *_: bad)
    (item,) = tried(tasks.self_test_of, "linear_residual", "addmm", "float32", "cpu").items
    assert (item.state, item.reason) == (FAILED, "at 2x3: NaN")


@pytest.mark.parametrize(("op", "name"), [("geglu", "torch"), ("linear_residual", "addmm")])
def test_numerics_are_those_of_the_device(tried, op, name):
    (item,) = tried(tasks.judge, op, name, "cpu").items
    assert (item.name, item.state) == (f"{op} {name}", PASSED)
    assert item.figures["largest_error"] <= item.figures["allowed"]
    assert item.figures["samples"] >= 2


@pytest.mark.parametrize("fault", ["off", "nan"])
def test_a_wrong_result_fails_with_its_figures(tried, fault, monkeypatch):
    op = OPS["geglu"]
    stock = op.implementations[0]

    def wrong(*arguments, **named):
        result = stock.run(*arguments, **named)
        return result * float("nan") if fault == "nan" else result * 1.1

    def given(name):
        return replace(stock, name="wrong", run=wrong) if name == "wrong" else stock

    monkeypatch.setattr(type(op), "implementation", lambda _self, name: given(name))
    monkeypatch.setattr(type(op), "config_at", lambda *_: stock.default)
    (item,) = tried(tasks.judge, "geglu", "wrong", "cpu").items
    assert item.state == FAILED
    assert "largest error" in item.reason
    # JSON has no NaN.
    assert all(value == value for value in item.figures.values())  # noqa: PLR0124 -- NaN is not itself


def test_what_a_device_does_not_take_is_skipped_with_the_reason(tried):
    assert on_card.runs_here(OPS["attention"], "sdpa_cudnn", CPU) is not None
    (item,) = tried(tasks.judge, "attention", "sdpa_cudnn", "cpu").items
    assert item.state == SKIPPED
    assert "this backend of torch is for GPUs" in item.reason


@pytest.fixture
def tiny(monkeypatch):
    make = workloads.make
    made = make("sd15-512", CPU, tiny=True, steps=1)
    monkeypatch.setattr(workloads, "make", lambda *_: made)
    return made


@pytest.fixture
def measured(tiny) -> Record:
    both = (("stock", 30.0), ("rocm-sd", 20.0))
    timed = tuple(Measurement(name, "1", "torch", 1, (ms,) * 4, 1, error=1e-3, stock_error=1e-3) for name, ms in both)
    compared = Comparison("rocm-sd", "stock", 1, 1.5, 1.4, 1.6, "faster")
    return Record("engines", tiny.facts, machine(CPU), "rocm-sd bench", now(), timed, (compared,))


def test_bench_runs_in_turns_and_gives_the_whole_record(tried, tiny, monkeypatch):
    monkeypatch.setattr(submission, "implausible", lambda *_, **__: ())
    monkeypatch.setattr(tasks, "_TURNS", 4)
    found = tried(tasks.bench, "emoji", "cpu")
    (item,), (values,) = found.items, found.records
    assert values["command"] == "rocm-sd bench emoji --engines stock,rocm-sd --repeats 4"
    assert len(values["measurements"]) == 2
    assert item.name == "emoji"
    assert {"stock_ms", "ours_ms", "ratio", "low", "high"} <= item.figures.keys()


def test_a_record_that_cannot_be_is_a_failure_and_is_not_sent(tried, tiny, measured, monkeypatch):
    monkeypatch.setattr(runner, "run", lambda *_, **__: measured)
    found = tried(tasks.bench, "emoji", "cpu")
    assert found.records == ()
    assert found.items[0].state == FAILED
    assert "small model" in found.items[0].reason


@pytest.mark.parametrize(
    ("verdict", "low", "high", "state", "words"),
    [
        ("faster", 1.4, 1.6, PASSED, "1.50 times as fast as stock (1.40 to 1.60)"),
        ("no difference", 0.9, 1.6, PASSED, "no difference from stock (0.90 to 1.60 times as fast)"),
        ("slower", 0.8, 0.9, FAILED, "1.50 times as fast as stock (0.80 to 0.90)"),
    ],
)
def test_what_is_slower_than_stock_is_a_failure(measured, verdict, low, high, state, words):
    record = replace(measured, comparisons=(Comparison("rocm-sd", "stock", 1, 1.5, low, high, verdict),))
    item = tasks._item("emoji", record, ())
    assert (item.state, item.reason) == (state, words)
    wrong = replace(record.measurements[1], ms=(), left_out="wrong result: 3")
    item = tasks._item("emoji", replace(record, measurements=(record.measurements[0], wrong), comparisons=()), ())
    assert (item.state, item.reason) == (FAILED, "rocm-sd: wrong result: 3")


def test_what_would_not_fit_into_the_time_is_not_begun(tried, tiny, monkeypatch):
    """As on a GPU: two steps tell how long a picture takes."""
    monkeypatch.setattr(tasks, "_picture_s", lambda _made: 40.0)
    monkeypatch.setattr(
        tasks.torch, "device", lambda name: type("Device", (), {"type": "cuda", "__str__": lambda _: name})()
    )
    (item,) = tried(tasks.bench, "sdxl-1024", "cuda:0", seconds=100.0).items
    assert item.state == SKIPPED
    assert item.reason == "the time was over: a picture takes stock 40 s here, and all of it about 16 min"


def test_seconds_of_a_picture_are_told_from_its_steps(tiny, tmp_path):
    attempt(str(tmp_path), 10.0, "unit", lambda: None or attempts.failed("x", "y"))
    assert 0 < tasks._picture_s(tiny) < 60


CHECKS = {
    "good": fine("All is well."),
    "bad": problem("It is broken.", "Pictures are black.", Fix("Mend it.")),
    "lost": unknown("It could not be run: no answer."),
    "absent": not_here("There is no GPU."),
}


@pytest.mark.parametrize(
    ("name", "state", "status"),
    [("good", PASSED, "ok"), ("bad", FAILED, "problem"), ("lost", FAILED, "unknown"), ("absent", SKIPPED, "not here")],
)
def test_a_check_is_an_item_with_what_it_says(tried, monkeypatch, name, state, status):
    def made(of: str, finding: Finding) -> Check:
        return Check(of, "Is it?", "nothing", (), lambda _facts, _probes: finding)

    monkeypatch.setattr(examination, "all_checks", lambda: tuple(made(*each) for each in CHECKS.items()))
    monkeypatch.setattr(on_host, "_facts", lambda: None)
    (item,) = tried(on_host.examined, name).items
    assert (item.name, item.state, item.figures, item.reason) == (name, state, {"status": status}, CHECKS[name].says)


def test_comfyui_that_cannot_use_rocm_sd_is_skipped_and_one_that_fails_is_recorded(tried, tmp_path, monkeypatch):
    from rocm_sd.doctor.check import CannotRun
    from rocm_sd.integrations import installing

    root = tmp_path / "ComfyUI"
    for folder in ("comfy", "custom_nodes"):
        (root / folder).mkdir(parents=True)
    for file in ("main.py", "nodes.py"):
        (root / file).touch()
    (root / "comfyui_version.py").write_text('__version__ = "0.9.9"\n')
    assert on_host.find_comfyui(root).version == "0.9.9"
    monkeypatch.setattr(installing, "examine", lambda *_: None)
    monkeypatch.setattr(installing, "what_to_type", lambda _facts: ["It has no torch."])
    (item,) = tried(on_host.comfyui, str(root), True).items
    assert (item.state, item.reason) == (SKIPPED, "ComfyUI 0.9.9 cannot use rocm-sd yet: It has no torch.")
    monkeypatch.setattr(installing, "what_to_type", lambda _facts: [])
    # There is no comfy to import in that folder.
    found = tried(on_host.comfyui, str(root), True)
    assert found.items[0].state == FAILED
    assert "comfy" in found.items[0].reason
    assert found.data["tracebacks"]["comfyui"]

    def lost(*_arguments, **_named):
        raise CannotRun("ComfyUI 0.9.9 was ended by SIGSEGV")

    monkeypatch.setattr(on_host, "answer_of", lost)
    (item,) = tried(on_host.comfyui, str(root), True).items
    assert (item.state, item.reason) == (FAILED, "ComfyUI 0.9.9 was ended by SIGSEGV")


def test_what_comfyui_answers_is_an_item_with_its_ratio():
    compared = {
        "engine": "rocm-sd",
        "against": "stock",
        "batch": 1,
        "ratio": 4.2,
        "low": 4.1,
        "high": 4.3,
        "verdict": "faster",
    }
    answer = {
        "model": "SD 1.5 at 512x512", "stock": [0.042], "optimized": [0.010], "distance": 1e-4, "allowed": 1e-3,
        "compared": compared,
    }  # fmt: skip
    (item,) = on_host._timed("ComfyUI 0.9.9", answer).items
    assert item.state == PASSED
    assert item.reason == "ComfyUI 0.9.9, SD 1.5 at 512x512: 4.20 times as fast as stock (4.10 to 4.30)"
    (item,) = on_host._timed("ComfyUI", {**answer, "compared": {**compared, "verdict": "slower"}}).items
    assert item.state == FAILED
