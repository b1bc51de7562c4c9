"""Faults of graphs, put in by hand: each is found, no caller sees it, and what is right and fastest is used.

On a CPU a trace stands for the graph, and is cut in the same way.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
import torch
from hosts_of_graphs import HOSTS

from rocm_sd.engine.capture import blocks, captured, trial

_WHOLE, _BLOCKS = "capture_graph", "capture_blocks"
_DOES_NOT = "operation not permitted when stream is capturing"


@pytest.fixture(autouse=True)
def exact_and_without_gradients(monkeypatch):
    # On a GPU convolutions of float32 would keep 10 bits.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    # The model of these tests is small.
    monkeypatch.setattr(blocks, "MOST_NODES", 8)
    with torch.no_grad():
        yield


@pytest.fixture(params=HOSTS.values(), ids=HOSTS)
def host(request, device):
    return request.param(device)


def inputs(host, seed=0):
    random = torch.Generator().manual_seed(seed)
    device = host.model.last.weight.device
    x, text = torch.randn(2, 4, 6, 6, generator=random), torch.randn(2, 3, 6, generator=random)
    return x.to(device), torch.full((2,), 900.0 - 10 * seed, device=device), text.to(device)


def call_with_changing_inputs(host, times):
    """Whatever is used, the answer is the model's."""
    for seed in range(times):
        given = inputs(host, seed)
        torch.testing.assert_close(host(*given), host.stock(*given), rtol=1e-4, atol=1e-5)


def notes(host):
    return "\n".join(host.notes())


def graph_of(host):
    (entry,) = host.calls._entries
    return entry.graph


def with_stale_input(monkeypatch, how, at):
    """Graphs that are captured so read at their replay number `at` what was there at the one before."""
    capture = getattr(captured, how)

    def faulty(function, device):
        graph, held, replays = capture(function, device), function.__self__.inputs[0], []
        before = [held.clone()]

        def replay():
            replays.append(1)
            now = held.clone()
            if len(replays) == at:
                held.copy_(before[-1])
            graph.replay()
            held.copy_(now)
            before.append(now)

        return replace(graph, replay=replay)

    monkeypatch.setattr(captured, how, faulty)


def failing(monkeypatch, how, times):
    """The first captures of that kind fail; the list has one item for each that was tried."""
    capture, tried = getattr(captured, how), []

    def fails(function, device):
        tried.append(how)
        if len(tried) <= times:
            raise RuntimeError(f"{_DOES_NOT}\nand more")
        return capture(function, device)

    monkeypatch.setattr(captured, how, fails)
    return tried


def taking(monkeypatch, graph, eager):
    """Milliseconds of each turn."""
    times = deque([graph, eager] * 3)

    def milliseconds(call, _device):
        call()
        return times.popleft()

    monkeypatch.setattr(captured, "_milliseconds", milliseconds)


@pytest.mark.parametrize("at", [2, 3, 4])
def test_a_stale_input_at_a_later_replay_is_found_and_blocks_are_used(host, monkeypatch, at):
    with_stale_input(monkeypatch, _WHOLE, at)
    call_with_changing_inputs(host, 12)
    assert graph_of(host).blocks > 1
    assert host.calls.replays == 9, "the second call is captured whole, the third in blocks"
    assert f"captured in blocks, because its replay {at}, on changed inputs, differs from an eager run by" in notes(
        host
    )
    assert f"a graph of it is {graph_of(host).blocks} blocks, replayed in order" in notes(host)


def test_where_blocks_are_wrong_as_well_nothing_is_replayed(host, monkeypatch):
    with_stale_input(monkeypatch, _WHOLE, 3)
    with_stale_input(monkeypatch, _BLOCKS, 4)
    call_with_changing_inputs(host, 12)
    assert host.calls.replays == 0
    assert not len(host.calls._entries)
    refusal = next(note for note in host.notes() if "is not captured" in note)
    assert "its replay 3, on changed inputs, differs" in refusal
    assert "in blocks, its replay 4, on changed inputs, differs" in refusal


def test_the_fault_after_the_trial_is_what_the_trial_is_for(host, monkeypatch):
    """A check of the injection: without the comparison a caller would see it."""
    with_stale_input(monkeypatch, _WHOLE, 5)
    with pytest.raises(AssertionError, match="not close"):
        call_with_changing_inputs(host, 3)


def test_a_graph_that_is_slower_than_eager_runs_is_given_up(host, monkeypatch):
    taking(monkeypatch, 5.1, 4.9)
    given = inputs(host)
    first = host(*given)
    call_with_changing_inputs(host, 8)
    name = host.calls._policy.name
    assert f"a graph of {name} takes 5.1 ms and eager 4.9 ms: it runs eagerly" in notes(host)
    assert host.calls.replays == 0
    assert graph_of(host) is None
    assert not host.calls.holds(given[0])
    assert torch.equal(host(*given), first), "the bits stay"
    ran = []
    host.kind.watch = staticmethod(lambda: ran.append(1))
    host(*given)
    assert len(ran) == 1, "nothing is compared any more"


def test_after_a_change_of_the_model_it_is_measured_again(host, monkeypatch):
    taking(monkeypatch, 5.1, 4.9)
    call_with_changing_inputs(host, 4)
    taking(monkeypatch, 4.9, 5.1)
    host.model.scale = 2.0
    call_with_changing_inputs(host, 3)
    assert host.calls.replays == 1
    assert "it runs eagerly" not in notes(host)


@pytest.mark.parametrize(("graph", "eager"), [(4.9, 5.1), (5.0, 5.0), (5.05, 5.0)])
def test_a_graph_that_is_as_fast_is_kept(host, monkeypatch, graph, eager):
    taking(monkeypatch, graph, eager)
    call_with_changing_inputs(host, 5)
    assert host.calls.replays == 3
    assert host.calls.holds(inputs(host)[0])


def test_one_slow_turn_decides_nothing(host, monkeypatch):
    times = deque([50.0, 5.0, 4.0, 5.0, 4.0, 5.0])
    monkeypatch.setattr(captured, "_milliseconds", lambda call, _device: (call(), times.popleft())[1])
    call_with_changing_inputs(host, 5)
    assert host.calls.replays == 3


def test_the_trial_is_over_with_the_second_call(host):
    """Three turns with an eager run each, beside the model's own answer, the capture, and the caller's own."""
    ran = []
    host.kind.watch = staticmethod(lambda: ran.append(1))
    given = inputs(host)
    host(*given)
    ran.clear()
    host(*given)
    assert len(ran) == 5
    assert host.calls.holds(given[0])
    host(*given)
    assert len(ran) == 5


def test_a_capture_that_fails_once_is_tried_once_more_at_the_next_call(host, monkeypatch):
    tried = failing(monkeypatch, _WHOLE, times=1)
    call_with_changing_inputs(host, 4)
    assert len(tried) == 2
    assert graph_of(host).blocks == 1
    assert host.calls.replays == 1
    assert f"captured again, because RuntimeError: {_DOES_NOT}" in notes(host)
    assert "is not captured" not in notes(host)


def test_a_capture_that_fails_twice_is_tried_in_blocks(host, monkeypatch):
    tried = failing(monkeypatch, _WHOLE, times=9)
    call_with_changing_inputs(host, 5)
    assert len(tried) == 2
    assert graph_of(host).blocks > 1
    assert host.calls.replays == 1
    assert f"captured in blocks, because RuntimeError: {_DOES_NOT}" in notes(host)


def test_where_blocks_fail_twice_as_well_it_is_refused(host, monkeypatch):
    tried = [failing(monkeypatch, how, times=9) for how in (_WHOLE, _BLOCKS)]
    call_with_changing_inputs(host, 9)
    assert [len(each) for each in tried] == [2, 2]
    assert host.calls.replays == 0
    reason = f"RuntimeError: {_DOES_NOT}"
    assert f"a call is not captured, because {reason}; in blocks, {reason}" in notes(host)


def test_what_was_wrong_stays_in_blocks_after_a_change_of_the_model(host, monkeypatch):
    with_stale_input(monkeypatch, _WHOLE, 3)
    call_with_changing_inputs(host, 4)
    host.model.scale = 2.0
    call_with_changing_inputs(host, 3)
    assert graph_of(host).blocks > 1


def test_an_answer_that_is_no_number_with_a_graph_and_without_is_no_fault_of_the_graph(host):
    for seed in range(3):
        x, *others = inputs(host, seed)
        x[0, 0, 0, seed % 6] = float("nan")
        assert torch.equal(host(x, *others).isnan(), host.stock(x, *others).isnan())
    assert host.calls.replays == 1


def test_later_replays_may_be_as_far_as_the_first_one_was():
    """As where kernels add in no fixed order: half a per mille of float16's norm is less than a rounding."""
    right = torch.ones(8, 1000, dtype=torch.float16)
    near, far = right.clone(), right.clone()
    near[:, :1] += 2**-10
    far[:] += 3 * 2**-10
    begun = trial.Trial.begun(near, right, lambda: right)
    begun.take(near, right, 1.0, 1.0)
    with pytest.raises(trial.NotAdopted, match="replay 3, on changed inputs"):
        begun.take(far, right, 1.0, 1.0)
    begun = trial.Trial.begun(far, right, lambda: right)
    begun.take(far, right, 1.0, 1.0)
    begun.take(-far, -right, 1.0, 1.0)
    with pytest.raises(trial.NotAdopted, match="differs from the model's forward"):
        trial.Trial.begun(2 * right, right, lambda: right)
