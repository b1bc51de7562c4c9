"""What every host's graphs keep, with the policy of each: the answer is the model's own, whatever comes between.

On a CPU a trace stands for the graph: it has baked in what a graph would have baked in.
"""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import contextmanager
from functools import wraps
from types import SimpleNamespace

import pytest
import torch
from hosts_of_graphs import HOSTS, Diffusers
from torch import nn
from torch.autograd import forward_ad

from rocm_sd.engine.capture import captured
from rocm_sd.engine.parts import Parts


@pytest.fixture(autouse=True)
def exact_and_without_gradients(monkeypatch):
    # On a GPU convolutions of float32 would keep 10 bits.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    with torch.no_grad():
        yield


@pytest.fixture(params=HOSTS.values(), ids=HOSTS)
def host(request, device):
    return request.param(device)


def inputs(host, seed=0, batch=2, size=6):
    random = torch.Generator().manual_seed(seed)
    device = host.model.last.weight.device
    x, text = torch.randn(batch, 4, size, size, generator=random), torch.randn(batch, 3, 6, generator=random)
    return x.to(device), torch.full((batch,), 900.0 - 100 * seed, device=device), text.to(device)


def near(ours, stock):
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-5)


def captured_by(host, *given):
    """Call it until it is replayed."""
    given = given or inputs(host)
    before = host.calls.replays
    for _ in range(3):
        result = host(*given)
    assert host.calls.replays > before
    return result


def watched(host):
    """How often the model itself runs."""
    runs = []
    host.kind.watch = staticmethod(lambda: runs.append(1))
    return runs


def said(host, words):
    return any(words in note for note in host.notes())


def test_every_call_gives_the_models_answer_and_replays_are_counted(host):
    given = inputs(host)
    stock, runs = host.stock(*given), watched(host)
    results = [host(*given) for _ in range(5)]
    for result in results:
        near(result, stock)
        assert torch.equal(result, results[0]), "every call of a kind gives the same bits"
    assert host.calls.replays == 3
    ran = len(runs)
    host(*given)
    assert len(runs) == ran, "a replay does not run the model"
    assert said(host, "1 graph of its forward")
    assert said(host, "replayed 4 times")


def test_a_replay_reads_the_values_of_its_own_call(host):
    captured_by(host)
    for seed in (1, 2):
        given = inputs(host, seed)
        near(host(*given), host.stock(*given))
    assert host.calls.replays == 3


def test_an_answer_stays_when_the_next_call_is_replayed(host):
    kept = captured_by(host)
    before = kept.clone()
    host(*inputs(host, seed=1))
    assert torch.equal(kept, before)


@pytest.mark.parametrize("other", [{"batch": 1}, {"size": 8}], ids=str)
def test_another_size_is_another_kind(host, other):
    captured_by(host)
    given = inputs(host, **other)
    near(captured_by(host, *given), host.stock(*given))
    assert said(host, "2 graphs of its forward")


def test_a_setting_of_torch_that_decides_about_kernels_is_another_kind(host, monkeypatch):
    captured_by(host)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    before = host.calls.replays
    near(host(*inputs(host)), host.stock(*inputs(host)))
    assert host.calls.replays == before


def test_while_another_thread_uses_the_graphs_the_model_itself_answers(host):
    given, other = inputs(host), inputs(host, seed=1)
    stock = host.stock(*other)
    within, release, owner = threading.Event(), threading.Event(), []

    def wait_in_the_first_call():
        if threading.get_ident() in owner and not within.is_set():
            within.set()
            release.wait(30)

    host.kind.watch = staticmethod(wait_in_the_first_call)
    results = []

    @torch.no_grad()
    def work():
        owner.append(threading.get_ident())
        results.append(host(*given))

    thread = threading.Thread(target=work)
    thread.start()
    assert within.wait(30)
    try:
        near(host(*other), stock)
        assert not host.calls._entries.memory, "the other thread's call is the one that is kept"
    finally:
        release.set()
        thread.join()
    near(results[0], host.stock(*given))
    with host.calls._busy:
        near(host(*given), host.stock(*given))
    assert host.calls.replays == 0


def test_a_use_from_another_stream_waits_for_the_last_one(host, monkeypatch):
    waits = []

    class Stream:
        def wait_stream(self, other):
            waits.append((self, other))

    one, other = Stream(), Stream()
    current = [one]
    monkeypatch.setattr(captured, "_current_stream", lambda _device: current[0])
    captured_by(host)
    assert not waits
    current[0] = other
    host(*inputs(host))
    assert waits == [(other, one)]
    # Another kind has memory of its own, and shares the first one's scratch.
    host(*inputs(host, batch=1))
    assert waits == [(other, one)]
    current[0] = one
    host(*inputs(host, batch=1))
    assert waits == [(other, one), (one, other)]


def test_a_model_that_keeps_changing_is_tried_four_times(host):
    given = inputs(host)
    for number in range(8):
        host.model.counted = number
        near(host(*given), host.stock(*given))
    assert host.calls.replays == 0
    assert said(host, "a call is not captured, because RuntimeError: the model keeps changing (the model: counted has")


def test_changes_with_replays_between_them_are_captured_each_time(host):
    given = inputs(host)
    for number in range(8):
        host.model.scale = 1.0 + number
        near(captured_by(host, *given), host.stock(*given))
    assert not said(host, "keeps changing")


def an_attribute(model):
    model.scale = 3.0


def a_layer(model):
    model.last = nn.Conv2d(8, 4, 3, padding=1).requires_grad_(False).to(model.last.weight.device)


def a_parameter(model):
    model.first.weight = nn.Parameter(model.first.weight * 2, requires_grad=False)


def an_address(model):
    model.first.weight.data = model.first.weight.data * 2


def padding(model):
    model.first.padding_mode = "circular"
    model.first._reversed_padding_repeated_twice = [1, 1, 1, 1]


@pytest.mark.parametrize("change", [an_attribute, a_layer, a_parameter, an_address, padding], ids=lambda c: c.__name__)
def test_whatever_changes_in_the_model_is_in_the_next_answer(host, change):
    given = inputs(host)
    before = captured_by(host, *given)
    change(host.model)
    stock = host.stock(*given)
    assert not torch.allclose(before, stock, rtol=1e-3, atol=1e-3)
    near(host(*given), stock)
    near(captured_by(host, *given), stock)
    assert said(host, "last captured anew because")


def test_weights_that_are_written_in_place_are_read_without_a_new_capture(host):
    captured_by(host)
    replays = host.calls.replays
    host.model.first.weight.mul_(1.5)
    given = inputs(host)
    near(host(*given), host.stock(*given))
    assert host.calls.replays == replays + 1


def test_a_model_that_changes_by_being_run_is_not_captured(host):
    host.kind.watch = staticmethod(lambda: setattr(host.model, "counted", getattr(host.model, "counted", 0) + 1))
    given = inputs(host)
    results = [host(*given) for _ in range(8)]
    for result in results:
        near(result, host.stock(*given))
    assert host.calls.replays == 0
    assert said(host, "a call is not captured, because RuntimeError: the model: counted has changed by being run")


def test_a_graph_that_differs_from_the_model_is_not_used(host, monkeypatch):
    real = captured.capture_graph

    def broken(function, device):
        graph = real(function, device)
        return captured.Graph(graph.outputs, lambda: [output.add_(1) for output in graph.outputs])

    monkeypatch.setattr(captured, "capture_graph", broken)
    given = inputs(host)
    for _ in range(3):
        near(host(*given), host.stock(*given))
    assert host.calls.replays == 0
    assert said(host, "a call is not captured, because its replay differs from the model's forward by")
    assert said(host, "in blocks, it has less than 150 nodes, too few to be cut into blocks")


def test_a_graph_that_gives_nan_is_not_used(host, monkeypatch):
    real = captured.capture_graph

    def broken(function, device):
        graph = real(function, device)
        return captured.Graph(graph.outputs, lambda: [output.fill_(float("nan")) for output in graph.outputs])

    monkeypatch.setattr(captured, "capture_graph", broken)
    given = inputs(host)
    for _ in range(3):
        near(host(*given), host.stock(*given))
    assert host.calls.replays == 0


def test_what_was_refused_is_not_tried_again_and_other_kinds_are(host, monkeypatch):
    attempts = []

    def failing(function, device):
        attempts.append(1)
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    with monkeypatch.context() as patch:
        patch.setattr(captured, "capture_graph", failing)
        for _ in range(5):
            near(host(*inputs(host)), host.stock(*inputs(host)))
    assert len(attempts) == 2, "once more, and in blocks, for which it is too small"
    (note,) = (note for note in host.notes() if "is not captured" in note)
    assert "because RuntimeError: operation not permitted when stream is capturing; in blocks, it has less" in note
    for _ in range(3):
        host(*inputs(host))
    assert host.calls.replays == 0
    captured_by(host, *inputs(host, batch=1))


class Held:
    """As a tensor of the call that ran out of memory."""


@pytest.mark.parametrize("at", ["first", "second"])
def test_memory_that_runs_out_is_free_before_the_model_itself_answers(host, monkeypatch, at):
    held, seen = [], []

    def failing(*_arguments):
        tensor = Held()
        held.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("out of memory")

    given = inputs(host)
    stock = host.stock(*given)
    host.kind.watch = staticmethod(lambda: seen.append(bool(held) and held[-1]() is None))
    if at == "first":
        monkeypatch.setattr(captured.warmup, "compile_kernels", failing)
    else:
        near(host(*given), stock)
        monkeypatch.setattr(captured, "capture_graph", failing)
    near(host(*given), stock)
    assert held
    assert seen[-1] is True, "the error's frames hold the memory"
    assert said(host, "OutOfMemoryError: out of memory")
    near(host(*given), stock)
    assert len(held) == 1
    assert not host.calls._entries.memory


def test_what_the_model_itself_cannot_do_is_the_callers_and_is_not_refused(host):
    def fail():
        raise ValueError("too many pictures")

    given = inputs(host)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host.kind, "watch", staticmethod(fail))
        for _ in range(2):
            with pytest.raises(ValueError, match="too many pictures"):
                host(*given)
    near(captured_by(host, *given), host.stock(*given))
    assert not said(host, "not captured")


class InterruptProcessingException(Exception):
    """Named as ComfyUI's."""


@pytest.mark.parametrize("at", ["first", "second"])
def test_an_interrupt_reaches_a_host_that_has_them_and_is_answered_elsewhere(host, at):
    pending = []

    def interrupt():
        if pending:
            raise pending.pop()

    host.kind.watch = staticmethod(interrupt)
    given = inputs(host)
    if at == "second":
        host(*given)
    pending.append(InterruptProcessingException())
    if host.interrupts:
        with pytest.raises(InterruptProcessingException):
            host(*given)
        near(captured_by(host, *given), host.stock(*given))
        assert not said(host, "not captured")
    else:
        near(host(*given), host.stock(*given))
        assert said(host, "InterruptProcessingException")
    assert not pending


def test_under_autocast_a_graph_of_another_dtype_is_not_replayed(host):
    given = inputs(host)
    captured_by(host, *given)
    replays = host.calls.replays
    with torch.autocast(given[0].device.type, torch.bfloat16):
        stock = host.stock(*given)
        assert stock.dtype == torch.bfloat16
        results = [host(*given) for _ in range(3)]
    for result in results:
        assert result.dtype == torch.bfloat16
        torch.testing.assert_close(result, stock, rtol=2e-2, atol=2e-2)
    assert host.calls.replays - replays == (1 if host.autocast else 0)


@pytest.mark.parametrize("of", ["an input", "a weight"])
def test_where_gradients_are_wanted_the_model_itself_runs(host, of):
    x, *others = inputs(host)
    wanted = x if of == "an input" else host.model.first.weight
    captured_by(host, x, *others)
    replays = host.calls.replays
    with torch.enable_grad():
        wanted.requires_grad_()
        host(x, *others).sum().backward()
    assert wanted.grad is not None
    assert float(wanted.grad.abs().sum()) > 0
    assert host.calls.replays == replays


def test_a_derivative_in_forward_mode_is_carried_by_the_model_itself(host):
    """A graph replays values alone: what comes out of it has no derivative, and nobody says so."""
    x, *others = inputs(host)
    captured_by(host, x, *others)
    replays = host.calls.replays
    found = []
    for call in (host.stock, host):
        with forward_ad.dual_level():
            found.append(forward_ad.unpack_dual(call(forward_ad.make_dual(x, torch.ones_like(x)), *others)).tangent)
    torch.testing.assert_close(found[1], found[0])
    assert host.calls.replays == replays


@pytest.mark.parametrize("where", ["compiler", "capture"])
def test_within_a_compiler_or_a_capture_of_somebody_else_the_model_itself_runs(host, monkeypatch, where):
    given = inputs(host)
    captured_by(host, *given)
    replays, runs = host.calls.replays, watched(host)
    with monkeypatch.context() as patch:
        if where == "compiler":
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
        else:
            patch.setattr(captured, "is_capturing", lambda _device: True)
        near(host(*given), host.stock(*given))
    assert len(runs) == 2
    assert host.calls.replays == replays
    host(*given)
    assert host.calls.replays == replays + 1


def test_weights_that_lie_on_no_device_are_not_captured(host):
    assert host.calls._runs_eagerly(torch.device("meta"))
    assert not host.calls._runs_eagerly(torch.device("cpu"))


def a_hook(model, seen):
    model.first.register_forward_hook(lambda *_: seen.append(1))


def a_forward(model, seen):
    plain = model.first.forward

    @wraps(plain)
    def forward(*args):
        seen.append(1)
        return plain(*args)

    model.first.forward = forward


def a_class(model, seen):
    class Counting(nn.Conv2d):
        def forward(self, x):
            seen.append(1)
            return super().forward(x)

    model.first.__class__ = Counting


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("put", "reason"),
    [(a_hook, "has a hook"), (a_forward, "has a forward that is not its class's own"), (a_class, "is of test_capture")],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_others_put_into_the_model_is_called_every_time(host, put, reason, when):
    given, seen = inputs(host), []
    if when == "after":
        captured_by(host, *given)
    put(host.model, seen)
    replays = host.calls.replays
    for _ in range(4):
        near(host(*given), host.stock(*given))
    # Once in each call, and once in each of stock's.
    assert len(seen) == 8
    assert host.calls.replays == replays
    assert said(host, f"4 calls without a graph, because its {type(host.model.first).__name__} {reason}")


def test_an_input_that_is_no_plain_tensor_is_left_to_the_model(host):
    x, time, text = inputs(host)
    given = (x, time, nn.Parameter(text, requires_grad=False))
    for _ in range(3):
        near(host(*given), host.stock(*given))
    assert host.calls.replays == 0
    assert said(host, "3 calls without a graph, because an input is neither a tensor on its device nor a plain value")


def test_graphs_keep_to_their_share_of_the_memory(host, monkeypatch):
    monkeypatch.setattr(captured, "free_memory", lambda _device: 0)
    for size in (6, 8, 10):
        given = inputs(host, size=size)
        near(captured_by(host, *given), host.stock(*given))
    assert sum(entry.graph is not None for entry in host.calls._entries) == 1
    assert said(host, "2 graphs gave way to others")


def test_scratch_of_the_libraries_is_given_back_around_each_capture_and_no_replay(host, monkeypatch):
    entered = []

    @contextmanager
    def given_back():
        entered.append(1)
        yield

    monkeypatch.setattr(captured, "library_scratch", SimpleNamespace(given_back=given_back))
    captured_by(host)
    assert len(entered) == 2


def test_clear_gives_the_memory_back_and_keeps_what_was_refused(host, monkeypatch):
    refused, given = inputs(host, batch=1), inputs(host)
    with monkeypatch.context() as patch:
        patch.setattr(captured, "capture_graph", lambda *_: 1 / 0)
        for _ in range(4):
            host(*refused)
    assert said(host, "a call is not captured, because ZeroDivisionError")
    captured_by(host, *given)
    assert host.calls._entries.memory
    assert host.calls.holds(given[0])
    host.calls.clear()
    assert not host.calls._entries.memory
    assert not host.calls.holds(given[0])
    replays = host.calls.replays
    for _ in range(3):
        near(host(*refused), host.stock(*refused))
    assert host.calls.replays == replays
    near(captured_by(host, *given), host.stock(*given))


def test_asleep_it_keeps_no_weights_and_wakes_up_if_they_are_the_same(host):
    given = inputs(host)
    captured_by(host, *given)
    replays = host.calls.replays
    host.calls.sleep()
    near(host(*given), host.stock(*given))
    assert host.calls.replays == replays + 1
    host.calls.sleep()
    # What is compared instead is looked at in test_snapshot.py; a trace, other than a graph, holds the weights itself.
    assert all(entry.snapshot is None for entry in host.calls._entries)
    old = weakref.ref(host.model.first.weight)
    host.model.first.weight = nn.Parameter(host.model.first.weight * 2, requires_grad=False)
    near(host(*given), host.stock(*given))
    gc.collect()
    assert old() is None
    assert host.calls.replays == replays + 1
    assert said(host, "the host has loaded it anew")


def test_a_call_that_is_kept_keeps_no_tensors_of_the_caller(host):
    given = inputs(host)
    captured_by(host, *given)
    gone = [weakref.ref(tensor) for tensor in given]
    del given
    gc.collect()
    assert [tensor() for tensor in gone] == [None] * 3


def test_the_graphs_do_not_keep_the_model_alive(host):
    captured_by(host)
    calls, gone = host.calls, weakref.ref(host.model)
    vars(host).clear()
    gc.collect()
    assert gone() is None
    assert calls.replays == 1


def test_without_graphs_each_call_is_as_the_first_of_its_kind(device):
    """A row of an ablation: what is computed once a picture, and no graph."""
    host = Diffusers(device, parts=Parts(captured=False))
    given = inputs(host)
    # On a GPU the first call compiles, for which the model is run as well.
    near(host(*given), host.stock(*given))
    runs = watched(host)
    for number in range(3):
        near(host(*given), host.stock(*given))
        # The model's own run is stock's.
        assert len(runs) == 2 * (number + 1)
    assert host.calls.replays == 0
