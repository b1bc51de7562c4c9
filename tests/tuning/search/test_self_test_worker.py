"""What is tested at first use runs in a process of its own: whatever it does there, this one goes on with stock."""

from __future__ import annotations

import os
import time

import pytest
import torch
from misbehaving import CANDIDATES

from rocm_sd import workers
from rocm_sd.ops import OPS, geglu, registry, self_test
from rocm_sd.tuning.database import Entry
from rocm_sd.tuning.environment import current
from rocm_sd.tuning.resolve import user_database

CPU = torch.device("cpu")
POINTS = {"rocm_sd.candidates": {"mine": "tuner_plugin:candidates"}}


def new_process() -> None:
    registry._say_once.cache_clear()
    registry.forget_choices()
    self_test.forget()


@pytest.fixture(autouse=True)
def card(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ROCM_SD_IMPLEMENTATION", raising=False)
    new_process()
    yield
    new_process()
    # The next test has another package: a process that has imported this one's would not see it.
    with workers.shared() as worker:
        worker.stop()


@pytest.fixture
def preferred(installed):
    """preferred(name): a package brings the candidates, and by a measurement this one is the fastest of geglu."""

    def bring(name: str, *names: str, extra: str = "") -> dict:
        listed = ", ".join(f"of({each!r}, {each})" for each in (name, *names))
        installed(CANDIDATES + extra + f"\n    def candidates():\n        return [{listed}]\n", POINTS)
        problem = OPS["geglu"].verification.problem(*arguments())
        times = (1.0, 1.0, 1.0, 100.0)
        user_database().put(
            [
                Entry("geglu", problem, current(CPU), "1", each, {}, *times, "ok", "2026-05-04")
                for each in (name, *names)
            ]
        )
        new_process()
        return problem

    return bring


def arguments() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, 8, dtype=torch.float16), torch.randn(8, dtype=torch.float16)


def test_one_that_is_right_is_used_after_a_test_elsewhere(preferred):
    extra = """
    def right(x, bias, *, config):
        kept["pid"] = os.getpid()
        return stock(x, bias)
    """
    problem = preferred("right", extra=extra)
    assert OPS["geglu"].choose(problem, CPU).implementation == "right"
    import tuner_plugin

    assert tuner_plugin.kept == {}, "it ran in this process"
    assert user_database().has_passed("geglu", "right", current(CPU), "1", "float16")
    new_process()
    pid = process_of_worker()
    assert OPS["geglu"].choose(problem, CPU).implementation == "right"
    assert process_of_worker() == pid


def process_of_worker() -> int:
    with workers.shared() as worker:
        return worker.call(os.getpid, timeout=60)


IN_ONE = """
    def wrong_in_one(x, bias, *, config):
        y = stock(x, bias)
        if y.numel() > 2**20:
            y.view(-1)[123_456] += 1
        return y
"""
MISBEHAVING = {
    "wrong_in_one": "the worst of",
    "nans": "largest error nan",
    "leaves_out": "largest error",
    "raises": "ValueError: not today",
    "aborts": "crashed by signal 6",
}


@pytest.mark.parametrize("name", MISBEHAVING)
def test_what_is_wrong_or_dies_is_set_aside_at_once(name, preferred):
    problem = preferred(name, extra=IN_ONE)
    found = OPS["geglu"].choose(problem, CPU)
    assert found.implementation == "torch"
    assert MISBEHAVING[name] in found.why
    (kept,) = user_database().quarantined()
    assert (kept.op, kept.candidate) == ("geglu", name)
    x, bias = arguments()
    assert torch.equal(geglu(x, bias), OPS["geglu"].implementations[0](x, bias))


def test_what_hangs_is_ended_within_ten_seconds_and_tried_once_more_in_another_process(preferred, monkeypatch):
    problem = preferred("hangs")
    process_of_worker()
    began = time.monotonic()
    found = OPS["geglu"].choose(problem, CPU)
    took = time.monotonic() - began
    assert found.implementation == "torch"
    assert "its test hung" in found.why
    # The worker imports the op, in its own time.
    assert self_test._JUDGE_S <= took < self_test._JUDGE_S + 10
    assert self_test._JUDGE_S < 10
    assert user_database().quarantined() == ()
    OPS["geglu"].choose({**problem, "m": 7}, CPU)
    assert time.monotonic() - began < took + 2, "this process does not try it again"
    # Another process, after this one has ended, that meets the same.
    monkeypatch.setattr(self_test, "_JUDGE_S", 0.5)
    monkeypatch.setattr("rocm_sd.tuning.database._lives", lambda _pid: False)
    new_process()
    assert OPS["geglu"].choose(problem, CPU).implementation == "torch"
    (kept,) = user_database().quarantined()
    assert kept.candidate == "hangs"


def test_without_a_worker_nothing_is_trusted_but_what_was_tested_before(preferred, monkeypatch):
    problem = preferred("sleeps")
    with workers.shared() as worker:
        worker.stop()
    with monkeypatch.context() as patch:
        patch.setattr(workers.sys, "frozen", True, raising=False)
        found = OPS["geglu"].choose(problem, CPU)
    assert found.implementation == "torch"
    assert "a frozen program has no interpreter to start" in found.why
    assert user_database().quarantined() == ()
    # Nor is it tried again at once: a model has dozens of kernels.
    again = self_test.verdict(OPS["attention"], "sdpa_math", {"dtype": "float32"}, CPU)
    assert again.state == "failed"
    assert "a frozen program" in again.reason
    user_database().passed("geglu", "sleeps", current(CPU), "1", "float16")
    new_process()
    assert OPS["geglu"].choose(problem, CPU).implementation == "sleeps"


def test_where_the_card_has_no_memory_for_it_the_reason_says_so(preferred):
    extra = """
    def full(x, bias, *, config):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    """
    problem = preferred("full", extra=extra)
    found = OPS["geglu"].choose(problem, CPU)
    assert "no memory is left on cpu to test it" in found.why
    assert user_database().quarantined() == ()
