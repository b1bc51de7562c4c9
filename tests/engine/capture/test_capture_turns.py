"""Whoever captures is by itself; those that run go on beside each other."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext

import pytest
import torch

from rocm_sd.engine.capture import CapturedCalls, HostCall, Policy, turns
from rocm_sd.engine.capture.turns import Turns

SOON_S = 0.1


class Thread:
    """Enters what it is given, and stays inside until it is told to leave."""

    def __init__(self, entered):
        self._inside, self._leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._stay, args=(entered,), daemon=True)
        self._thread.start()

    def _stay(self, entered):
        with entered:
            self._inside.set()
            self._leave.wait(10)

    def is_inside(self, within=SOON_S):
        return self._inside.wait(within)

    def leave(self):
        self._leave.set()
        self._thread.join(10)
        assert not self._thread.is_alive()


def test_several_run_at_once():
    them = Turns()
    threads = [Thread(them.running()) for _ in range(3)]
    assert all(thread.is_inside(10) for thread in threads)
    for thread in threads:
        thread.leave()


def test_a_capture_waits_for_those_that_run_and_is_let_in_before_others():
    them = Turns()
    runs = Thread(them.running())
    assert runs.is_inside(10)
    captures = Thread(them.capturing())
    assert not captures.is_inside()
    late = Thread(them.running())
    assert not late.is_inside()
    runs.leave()
    assert captures.is_inside(10)
    assert not late.is_inside()
    captures.leave()
    assert late.is_inside(10)
    late.leave()


def test_two_captures_are_one_after_the_other():
    them = Turns()
    first = Thread(them.capturing())
    assert first.is_inside(10)
    second = Thread(them.capturing())
    assert not second.is_inside()
    first.leave()
    assert second.is_inside(10)
    second.leave()


def test_both_can_be_nested():
    them = Turns()
    with them.running(), them.running(), them.capturing(), them.capturing(), them.running():
        other = Thread(them.running())
        assert not other.is_inside()
    assert other.is_inside(10)
    other.leave()
    last = Thread(them.capturing())
    assert last.is_inside(10)
    last.leave()


def test_a_run_within_another_does_not_wait_for_whoever_wants_to_capture():
    them = Turns()
    with them.running():
        wants = Thread(them.capturing())
        assert not wants.is_inside()
        with them.running():
            pass
    assert wants.is_inside(10)
    wants.leave()


def test_two_that_capture_in_the_middle_of_a_run_do_not_wait_for_each_other_for_ever():
    them, both = Turns(), threading.Barrier(2)
    at_once, most = [], []

    def work():
        with them.running():
            both.wait(10)
            with them.capturing():
                at_once.append(1)
                most.append(len(at_once))
                time.sleep(0.01)
                at_once.pop()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert most == [1, 1]


def test_what_raises_leaves_nobody_waiting():
    them = Turns()
    with pytest.raises(ValueError, match="mine"), them.running(), them.capturing():
        raise ValueError("mine")
    with them.capturing():
        pass


@pytest.mark.parametrize("within", [True, False], ids=["within a run", "by itself"])
def test_whoever_is_interrupted_while_it_waits_leaves_nobody_waiting(monkeypatch, within):
    them = Turns()
    runs = Thread(them.running())
    assert runs.is_inside(10)

    def interrupted(_holds):
        raise KeyboardInterrupt

    with them.running() if within else nullcontext():
        with monkeypatch.context() as patch:
            patch.setattr(them._changed, "wait_for", interrupted)
            with pytest.raises(KeyboardInterrupt), them.capturing():
                pass
        captures = Thread(them.capturing())
        assert not captures.is_inside()
        runs.leave()
        assert captures.is_inside(SOON_S if within else 10) is not within
    assert captures.is_inside(10)
    captures.leave()


def test_many_threads_never_meet_a_capture():
    them, captures, faults = Turns(), threading.Event(), []

    def run():
        for _ in range(200):
            with them.running():
                if captures.is_set():
                    faults.append("a run beside a capture")

    def capture():
        for _ in range(50):
            with them.running(), them.capturing():
                if captures.is_set():
                    faults.append("two captures")
                captures.set()
                time.sleep(0.0002)
                captures.clear()

    threads = [threading.Thread(target=each, daemon=True) for each in (run, run, run, capture, capture)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not faults


def test_a_cpu_has_no_turns():
    with turns.capturing(torch.device("cpu")):
        other = Thread(turns.running(torch.device("cpu")))
        assert other.is_inside(10)
    other.leave()


class Always(Policy):
    def why_not(self, _model, _device):
        return None


@pytest.mark.gpu
def test_models_of_several_threads_are_captured_and_right():
    """Each has its own model, and all begin at the same time."""
    device = torch.device("cuda:0")
    models = [torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(30))).to(device) for _ in range(4)]
    calls = [CapturedCalls(model, Always(f"model {number}")) for number, model in enumerate(models)]
    begin, wrong = threading.Barrier(len(models)), []

    def work(number):
        model, begun = models[number], torch.Generator(device).manual_seed(number)
        begin.wait(10)
        with torch.no_grad():
            for turn in range(60):
                x = torch.randn(2 + turn // 20, 64, generator=begun, device=device)
                given = HostCall((x,), {}, device, lambda x=x: model(x), model)
                answer = calls[number](given)
                with turns.running(device):
                    right = model(x)
                if not torch.allclose(answer, right, atol=1e-5):
                    wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    # One that is slower beside the others is computed without its graph; none is refused.
    assert not [note for call in calls for note in call.notes() if "not captured" in note]
    assert any(call.replays for call in calls)
