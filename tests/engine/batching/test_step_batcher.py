"""Pictures that share the calls of their model: each gets what it would get by itself, whoever else is there."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import pytest
import torch
from torch import nn

from rocm_sd.engine.batching import LADDER, StepBatcher, merged, step_batcher
from rocm_sd.engine.batching.merging import StepCall

CPU = torch.device("cpu")


class Model(nn.Module):
    """Of each sample something else, and of no other one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.calls = []

    def forward(self, sample, timestep, text, added=None, return_dict=True):
        timestep = torch.as_tensor(timestep)
        self.calls.append((len(sample), tuple(timestep.reshape(-1).tolist()), threading.get_ident()))
        time.sleep(0.002)
        if bool((sample == 1313).any()):
            raise ValueError("unlucky")
        moved = timestep.reshape(-1).expand(len(sample)).view(-1, 1, 1)
        total = sample * moved + text.sum(-1).view(-1, 1, 1) + (0 if added is None else added["ids"].view(-1, 1, 1))
        return {"sample": total} if return_dict else (total,)


@pytest.fixture
def batcher():
    made = []

    def make(**options):
        made.append(StepBatcher(CPU, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def together(count, work):
    """work(number) on a thread each, begun at once; what they gave or raised."""
    found, start = {}, threading.Barrier(count)

    def go(number):
        start.wait(10)
        try:
            found[number] = work(number)
        except Exception as error:  # noqa: BLE001 -- it is looked at
            found[number] = error

    threads = [threading.Thread(target=go, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == count, "a thread hangs"
    return [found[number] for number in range(count)]


def drawn(model, number, steps=6, samples=2):
    """As a pipeline's loop: each picture has its own number of steps, values and timesteps."""
    value = torch.full((samples, 3, 4), float(number))
    for step in range(steps):
        time_now = torch.tensor(step + number) if number % 2 else torch.tensor(step + number + 0.5)
        value = model(value, time_now, text=torch.full((samples, 5), 0.1 * number), return_dict=False)[0]
        value = value / 10
    return value


@pytest.mark.parametrize("ladder", [(), LADDER], ids=["any size", "ladder"])
def test_each_gets_its_own_and_calls_are_shared(batcher, ladder):
    model, alone = Model(), Model()
    shared = batcher(most=8, ladder=ladder)
    shared.take(model)

    def work(number):
        with shared.member():
            return drawn(model, number, steps=4 + number, samples=1 + number % 2)

    got = together(6, work)
    for number, value in enumerate(got):
        assert torch.equal(value, drawn(alone, number, steps=4 + number, samples=1 + number % 2))
    asked = sum(4 + number for number in range(6))
    assert len(model.calls) < asked / 2, "most calls were shared"
    assert max(size for size, _, _ in model.calls) <= 8
    assert len({thread for _, _, thread in model.calls}) == 1, "one thread runs the model"
    if ladder:
        assert {size for size, _, _ in model.calls} <= set(LADDER)


def test_calls_of_others_go_on_as_before(batcher):
    model, shared = Model(), batcher()
    release = shared.take(model)
    drawn(model, 1)
    assert {thread for _, _, thread in model.calls} == {threading.get_ident()}
    release()
    assert "forward" not in vars(model)


def test_shapes_groups_and_other_arguments_keep_calls_apart(batcher):
    model, shared = Model(), batcher(most=64)
    shared.take(model)

    def work(number):
        side = 3 + number % 2
        with shared.member("a" if number < 4 else "b"):
            added = {"ids": torch.ones(1)} if number in {2, 3} else None
            value = torch.ones(1, side, 4)
            for _ in range(3):
                value = model(value, 1, torch.ones(1, 5), added, return_dict=False)[0]
            return value.shape

    assert together(8, work) == [(1, 3 + number % 2, 4) for number in range(8)]
    # Of eight pictures two agree at most: two shapes, two groups, and one of those with more arguments.
    assert max(size for size, _, _ in model.calls) <= 2


def test_those_that_share_nothing_run_as_they_are(batcher):
    model, shared = Model(), batcher()
    shared.take(model)
    moment = torch.tensor(3)

    def work(_number):
        with shared.member(None):
            return [model(torch.ones(2, 3, 4), moment, torch.ones(2, 5), return_dict=False)[0] for _ in range(3)]

    together(3, work)
    assert [size for size, _, _ in model.calls] == [2] * 9
    assert all(len(times) == 1 for _, times, _ in model.calls), "their timestep is the one that they gave"


def test_whoever_is_at_fault_fails_alone(batcher):
    model, shared = Model(), batcher()
    shared.take(model)

    def work(number):
        with shared.member():
            return drawn(model, 1313 if number == 2 else number, steps=3)

    got = together(5, work)
    assert isinstance(got[2], ValueError)
    for number in (0, 1, 3, 4):
        assert torch.equal(got[number], drawn(Model(), number, steps=3))


def test_memory_that_runs_out_makes_later_batches_smaller(batcher):
    class Large(Model):
        def forward(self, sample, timestep, text, added=None, return_dict=True):
            if len(sample) > 4:
                self.calls.append((len(sample), (), 0))
                raise torch.OutOfMemoryError("no memory left")
            return super().forward(sample, timestep, text, added, return_dict)

    model, shared = Large(), batcher(most=16)
    shared.take(model)

    def work(number):
        with shared.member():
            return drawn(model, number, steps=8)

    for number, value in enumerate(together(6, work)):
        assert torch.equal(value, drawn(Model(), number, steps=8))
    assert sum(size > 4 for size, _, _ in model.calls) <= 3, "it is not tried again and again"


def test_a_picture_stops_at_its_next_step_and_the_others_go_on(batcher):
    model, shared = Model(), batcher()
    shared.take(model)
    stopped = threading.Event()

    def work(number):
        reached = []
        stop = (lambda: KeyError("stop") if stopped.is_set() else None) if number == 1 else (lambda: None)
        with shared.member(stop=stop):
            value = torch.full((1, 3, 4), float(number))
            for step in range(8):
                reached.append(step)
                if number == 1 and step == 3:
                    stopped.set()
                value = model(value, step, torch.ones(1, 5), return_dict=False)[0] / 10
        return len(reached)

    got = together(3, work)
    assert isinstance(got[1], KeyError)
    assert got[0] == got[2] == 8


def test_nobody_waits_for_a_picture_that_rests(batcher, monkeypatch):
    monkeypatch.setattr(step_batcher, "_MORE_S", 30.0)
    monkeypatch.setattr(step_batcher, "_MOST_S", 30.0)
    model, shared = Model(), batcher()
    shared.take(model)
    release = threading.Event()

    def work(number):
        with shared.member() as member:
            drawn(model, number, steps=2 if number else 6)
            if number:
                shared.rest(member)
                release.wait(10)
            else:
                release.set()
        return number

    began = time.monotonic()
    assert together(3, work) == [0, 1, 2]
    assert time.monotonic() - began < 10


def test_a_slow_one_is_waited_for_as_long_as_it_takes_and_one_that_is_too_slow_is_not(batcher):
    """Of pictures that each take a while between two steps, nearly all calls are shared."""

    def pictures_a_call(pauses):
        model, shared = Model(), batcher()
        shared.take(model)

        def work(number):
            with shared.member():
                for _ in range(12):
                    model(torch.ones(1, 3, 4), 1, torch.ones(1, 5))
                    time.sleep(pauses[number])

        together(len(pauses), work)
        return [size for size, _, _ in model.calls]

    alike = pictures_a_call([0.004] * 4)
    assert sum(alike) == 48
    assert len(alike) < 24
    began = time.monotonic()
    sizes = pictures_a_call([0.0, 0.0, 0.2])
    assert 1 in sizes
    assert time.monotonic() - began < 12 * 0.2 + 2


def test_a_model_is_made_ready_for_a_group_once(batcher):
    model, shared, ready = Model(), batcher(), []
    shared.take(model, ready.append)

    def work(number):
        with shared.member(("lora", number // 3)):
            return drawn(model, number, steps=3)

    together(6, work)
    assert sorted(ready) == [("lora", 0), ("lora", 1)], "the pictures of one group come to their end first"


def test_a_model_that_was_made_ready_half_way_is_ready_for_nobody(batcher):
    model, shared, ready = Model(), batcher(), []

    def prepare(group):
        ready.append(group)
        if ready == ["a", "b"]:
            raise KeyError("half-way")

    shared.take(model, prepare)

    def draw(group):
        with shared.member(group):
            return drawn(model, 1, steps=1)

    draw("a")
    with pytest.raises(KeyError):
        draw("b")
    draw("a")
    assert ready == ["a", "b", "a"]


def test_a_group_does_not_keep_the_others_waiting_for_ever(batcher, monkeypatch):
    monkeypatch.setattr(step_batcher, "_STAYS_S", 0.05)
    model, shared, ready = Model(), batcher(), []
    shared.take(model, ready.append)
    others = threading.Event()

    def work(number):
        with shared.member(number):
            steps = 0
            while steps < 4 or (number == 0 and not others.is_set() and steps < 4000):
                model(torch.ones(1, 3, 4), 1, torch.ones(1, 5))
                steps += 1
        if number:
            others.set()
        return steps

    long, short = together(2, work)
    assert short == 4
    assert long < 4000, "the other one was drawn meanwhile"
    assert len(ready) >= 2
    assert all(one != other for one, other in pairwise(ready))


def test_what_was_done_is_told(batcher):
    told = []
    model, shared = Model(), batcher(most=8, ladder=(4, 8), on_batch=told.append)
    shared.take(model, name="mine")

    def work(number):
        with shared.member():
            return drawn(model, number, steps=4, samples=1)

    together(3, work)
    assert sum(done.pictures for done in told) == 12
    assert all(done.samples == 4 and done.padded == 4 - done.pictures for done in told)
    assert {done.model for done in told} == {"mine"}


@pytest.mark.parametrize("timestep", [7, 7.0, torch.tensor(7), torch.tensor([7.0]), torch.tensor([7, 7])])
def test_timesteps_of_every_kind_are_one_for_each_sample(timestep):
    call = StepCall.of(Model(), (torch.ones(2, 3), timestep, torch.ones(2, 5)), {})
    assert call.samples == 2
    assert torch.equal(call.named["timestep"], torch.full((2,), 7.0))
    assert (
        call.key == StepCall.of(Model(), (), {"sample": torch.zeros(2, 3), "timestep": 1, "text": torch.ones(2, 5)}).key
    )
    both = merged([call, call], 6)
    assert both.named["sample"].shape == (6, 3)
    assert both.padded == 2
    assert [len(part) for part in both.apart((torch.ones(6, 1),))[0]] == [2]
    with pytest.raises(ValueError, match="6 samples"):
        both.apart((torch.ones(4, 1),))


@pytest.mark.parametrize(
    "given",
    [
        {"timestep": torch.ones(3)},
        {"text": torch.ones(4, 5)},
        {"text": object()},
        {"no_such": 1},
        {"sample": torch.ones(0, 3)},
    ],
)
def test_what_cannot_be_merged_has_no_key(given):
    named = {"sample": torch.ones(2, 3), "timestep": 1, "text": torch.ones(2, 5), **given}
    assert StepCall.of(Model(), (), named).key is None
