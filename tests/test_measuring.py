"""Times are taken in turns and compared honestly: shown on simulated noise whose truth is known."""

from __future__ import annotations

import time
from contextlib import nullcontext
from itertools import count, permutations

import numpy as np
import pytest
import torch

from rocm_sd import arch, measuring
from rocm_sd.measuring import Stopwatch, compare, flush_bytes, interleaved, interval, settled, turn

NOISES = ("plain", "drift", "spikes", "correlated", "drift spikes correlated")


class Scripted(Stopwatch):
    """Tells given times, and repeats the last."""

    def __init__(self, *times):
        super().__init__("cpu")
        self.times = list(times)
        self.calls = 0

    def milliseconds(self, call):
        call()
        self.calls += 1
        return self.times[min(self.calls, len(self.times)) - 1]


def two_equal_engines(rng, noise, turns):
    """Timings of two that are equally fast; drift and correlated noise are the machine's, spikes are their own."""
    machine = np.ones(turns)
    if "drift" in noise:
        machine *= 1 + 0.2 * np.linspace(0, 1, turns)
    if "correlated" in noise:
        walk = np.zeros(turns)
        for index in range(1, turns):
            walk[index] = 0.8 * walk[index - 1] + rng.normal(0, 0.03)
        machine *= np.exp(walk)
    own = np.exp(rng.normal(0, 0.02, (2, turns)))
    if "spikes" in noise:
        own *= np.where(rng.random((2, turns)) < 0.1, 1 + rng.exponential(0.5, (2, turns)), 1)
    return 100 * machine * own


@pytest.mark.parametrize(
    ("noise", "turns"),
    [(noise, 10) for noise in NOISES] + [(noise, turns) for noise in (NOISES[0], NOISES[-1]) for turns in (5, 8, 20)],
)
def test_the_interval_covers_the_truth_and_equal_things_are_not_called_different(noise, turns):
    rng = np.random.default_rng(7)
    found = [compare("a", "b", 1, *two_equal_engines(rng, noise, turns).tolist()) for _ in range(400)]
    covered = sum(one.low <= 1 <= one.high for one in found)
    called = sum(one.verdict != "no difference" for one in found)
    # Three standard errors of a count that is right 19 times in 20: 3.3% of 400.
    luck = 3 * (len(found) * 0.95 * 0.05) ** 0.5
    assert covered >= 0.95 * len(found) - luck
    assert called <= 0.05 * len(found) + luck


def test_an_interval_is_not_so_wide_that_it_always_covers():
    rng = np.random.default_rng(8)
    found = [interval(*two_equal_engines(rng, "plain", 12).tolist()) for _ in range(400)]
    assert 0.92 <= sum(low <= 1 <= high for low, high in found) / len(found) <= 0.98
    assert np.median([high - low for low, high in found]) < 0.05


@pytest.mark.parametrize("noise", NOISES)
def test_a_real_difference_is_found_with_its_size(noise):
    ours, theirs = two_equal_engines(np.random.default_rng(3), noise, 20)
    found = compare("ours", "theirs", 4, ours.tolist(), (1.5 * theirs).tolist())
    assert found.verdict == "faster"
    assert found.low < 1.5 < found.high
    assert (found.engine, found.against, found.batch) == ("ours", "theirs", 4)
    assert compare("ours", "theirs", 4, (1.5 * theirs).tolist(), ours.tolist()).verdict == "slower"


def test_an_interval_scales_with_the_times():
    ours, theirs = two_equal_engines(np.random.default_rng(5), "spikes", 12)
    low, high = interval(ours.tolist(), theirs.tolist())
    assert interval(ours.tolist(), (3 * theirs).tolist()) == pytest.approx((3 * low, 3 * high))


def test_what_slows_a_whole_turn_leaves_the_interval():
    ours, theirs = two_equal_engines(np.random.default_rng(5), "plain", 20)
    weather = np.exp(np.random.default_rng(6).normal(0, 0.5, 20))
    low, high = interval((ours * weather).tolist(), (theirs * weather).tolist())
    unpaired = interval((ours * weather).tolist(), (theirs * weather[::-1]).tolist())
    assert high - low < 0.5 * (unpaired[1] - unpaired[0])


def test_a_difference_smaller_than_the_spread_is_not_called_one():
    rng = np.random.default_rng(1)
    ours, theirs = np.exp(rng.normal(0, 0.05, (2, 2000)))
    found = compare("a", "b", 1, ours.tolist(), (1.02 * theirs).tolist())
    assert found.low > 1  # so many turns leave no doubt that there is one
    assert found.verdict == "no difference"


def test_the_same_timings_give_the_same_interval():
    ours, theirs = two_equal_engines(np.random.default_rng(2), "spikes", 10).tolist()
    assert compare("a", "b", 1, ours, theirs) == compare("a", "b", 1, ours, theirs)


def test_too_few_turns_make_no_verdict():
    assert compare("a", "b", 1, [10.0] * 3, [20.0] * 3).verdict == "no difference"
    assert compare("a", "b", 1, [10.0, 10.1, 10.2, 10.3], [20.0] * 4).verdict == "faster"
    with pytest.raises(ValueError, match="a has 0 timings"):
        compare("a", "b", 1, [], [1.0])


def test_turns_that_only_one_side_has_are_left_out():
    found = compare("a", "b", 1, [10.0] * 6 + [99.0] * 20, [20.0] * 6)
    assert found.ratio == 2


def test_three_engines_meet_in_all_six_orders():
    orders = [tuple(turn("abc", number)) for number in range(6)]
    assert set(orders) == set(permutations("abc"))
    assert [turn("ab", number) for number in range(4)] == [["a", "b"], ["b", "a"], ["b", "a"], ["a", "b"]]


def test_every_place_is_shared_equally():
    names = list("abcde")
    places = {name: [turn(names, number).index(name) for number in range(10)] for name in names}
    assert all(sorted(seen) == sorted([0, 1, 2, 3, 4] * 2) for seen in places.values())


def calls_noting(heard, *names):
    return {name: (lambda name=name: heard.append(name)) for name in names}


def test_interleaved_takes_turns_and_tells_each_timing_at_once():
    heard, turns = [], []
    times = interleaved(
        calls_noting(heard, "a", "b"), Scripted(1.0, 2.0, 3.0, 4.0), repeats=2, on_turn=lambda *each: turns.append(each)
    )
    assert heard == ["a", "b", "b", "a"]
    assert times == {"a": [1.0, 4.0], "b": [2.0, 3.0]}
    assert turns == [("a", 1.0), ("b", 2.0), ("b", 3.0), ("a", 4.0)]


def test_a_resumed_run_measures_only_what_is_missing():
    heard = []
    done = {"a": [1.0, 2.0], "b": [3.0]}
    times = interleaved(calls_noting(heard, "a", "b"), Scripted(9.0), repeats=3, done=done)
    assert heard == ["b", "b", "a"]
    assert times == {"a": [1.0, 2.0, 9.0], "b": [3.0, 9.0, 9.0]}
    assert done == {"a": [1.0, 2.0], "b": [3.0]}


def test_an_interrupted_run_has_reported_what_it_has():
    turns = []
    numbers = count(1)

    def interrupted_in_the_third_call():
        if next(numbers) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interleaved(
            dict.fromkeys("ab", interrupted_in_the_third_call),
            Scripted(1.0),
            repeats=5,
            on_turn=lambda name, _: turns.append(name),
        )
    assert turns == ["a", "b"]


@pytest.mark.parametrize(
    ("times", "calls"),
    [
        ([1.0, 1.0, 1.0], 3),
        ([92000.0, 3000.0, 1.0, 1.0, 1.0], 5),
        ([50.0, 1.0, 1.0, 1.0], 4),
        ([8.0, 6.0, 4.0, 3.0, 2.0, 1.5, 1.0, 1.0, 1.0], 9),
    ],
    ids=["steady", "compiled-then-captured", "first-slow", "falling"],
)
def test_a_warm_up_ends_when_the_median_stops_moving(times, calls):
    assert len(settled(lambda: None, Scripted(*times))) == calls


def test_calls_before_a_warm_up_count_for_it():
    stopwatch = Scripted(1.0, 1.0, 1.0)
    assert settled(lambda: None, stopwatch, before=[1.0]) == [1.0] * 3
    assert stopwatch.calls == 2


def test_a_warm_up_that_never_settles_ends_at_most():
    halving = [1e6 / 2**index for index in range(40)]
    assert settled(lambda: None, Scripted(*halving), most=12) == halving[:12]


def test_the_budget_of_a_warm_up_does_not_pay_for_the_first_call():
    halving = Scripted(*[1e6 / 2**index for index in range(40)])
    first = iter([0.3])
    settled(lambda: time.sleep(next(first, 0.0)), halving, budget_s=0.25, most=6)
    assert halving.calls == 6
    slow = Scripted(*[1e6 / 2**index for index in range(40)])
    settled(lambda: time.sleep(0.1), slow, budget_s=0.25, most=40)
    assert slow.calls == 4


def test_a_stopwatch_tells_milliseconds():
    # A longer time than asked for is the system's; a shorter one would be the stopwatch's.
    assert 30 <= Stopwatch("cpu").milliseconds(lambda: time.sleep(0.03)) < 300


def test_a_cold_stopwatch_overwrites_the_caches_before_every_call_and_not_in_its_time():
    stopwatch = Stopwatch("cpu", cold=True)
    assert stopwatch._flush.nbytes == flush_bytes(torch.device("cpu")) == 256 * 2**20
    seen = []

    def call():
        seen.append(int(stopwatch._flush[-1]))
        stopwatch._flush[-1] = 0

    started = time.perf_counter()
    measured = stopwatch.milliseconds(call) + stopwatch.milliseconds(call)
    whole = (time.perf_counter() - started) * 1e3
    assert set(seen) == {1}
    assert measured < 0.5 * whole


@pytest.mark.parametrize(("name", "mebibytes"), [("gfx942", 512), ("gfx1100", 192)])
def test_a_flush_is_twice_the_last_level_cache(monkeypatch, name, mebibytes):
    monkeypatch.setattr(arch, "detect", lambda _: arch.get(name))
    assert flush_bytes(torch.device("cuda")) == mebibytes * 2**20


def test_a_short_call_that_lost_the_processor_is_timed_again(monkeypatch):
    switches = iter([0, 1, 1, 2, 2, 2])
    monkeypatch.setattr(measuring, "_switches", lambda: next(switches))
    calls = []
    Stopwatch("cpu").milliseconds(lambda: calls.append(1))
    assert len(calls) == 3


def test_a_long_call_or_a_busy_machine_is_not_timed_for_ever(monkeypatch):
    monkeypatch.setattr(measuring, "_switches", count().__next__)
    calls = []
    Stopwatch("cpu").milliseconds(lambda: (calls.append(1), time.sleep(0.03)))
    assert len(calls) == 1
    calls.clear()
    Stopwatch("cpu").milliseconds(lambda: calls.append(1))
    assert len(calls) == 4


class Card:
    """Stands for torch.cuda: its waiting kernel counts `mhz` million ticks a second; `longest` is its longest wait."""

    def __init__(self, monkeypatch, mhz):
        self.now = self.longest = 0.0
        card = self

        class Event:
            def __init__(self, *, enable_timing):
                assert enable_timing

            def record(self):
                self.at = card.now

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return end.at - self.at

        def sleep(ticks):
            lasted = ticks / (mhz * 1e3)
            self.longest = max(self.longest, lasted)
            self.now += 0.005 + lasted

        for name, value in {"_sleep": sleep, "Event": Event, "synchronize": lambda: None}.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
        measuring._hand_over_ticks.cache_clear()


@pytest.fixture
def _ticks_asked_anew():
    yield
    measuring._hand_over_ticks.cache_clear()


@pytest.mark.usefixtures("_ticks_asked_anew")
# A Radeon of gfx11 counts 100 MHz; an engine clock may fall to a fraction of one where a single wave waits.
@pytest.mark.parametrize("mhz", [0.16, 25.0, 100.0, 1800.0, 2000.0, 3000.0])
def test_a_hand_over_lasts_as_long_whatever_clock_is_counted(monkeypatch, mhz):
    card = Card(monkeypatch, mhz)
    assert 0.15 < measuring._hand_over_ticks(torch.device("cuda", 0)) / (mhz * 1e3) < 0.25
    # Nor does finding out last much longer: 400,000 ticks would be 2.5 s at the slowest of these, 4 ms at 100 MHz.
    assert card.longest <= max(1000 / (mhz * 1e3), 0.45)


@pytest.mark.usefixtures("_ticks_asked_anew")
def test_a_queued_call_waits_for_the_calibrated_time(monkeypatch):
    card = Card(monkeypatch, 100.0)
    stopwatch = Stopwatch("cuda:0", queued=True)
    stopwatch.milliseconds(lambda: None)
    card.longest = 0.0
    stopwatch.milliseconds(lambda: None)
    assert 0.15 < card.longest < 0.25


@pytest.mark.usefixtures("_ticks_asked_anew")
def test_a_kernel_that_does_not_wait_is_not_tried_for_ever(monkeypatch):
    Card(monkeypatch, float("inf"))
    assert measuring._hand_over_ticks(torch.device("cuda", 0)) == measuring._MOST_TICKS


@pytest.mark.gpu
def test_on_a_gpu_a_hand_over_lasts_a_fifth_of_a_millisecond():
    device = torch.device("cuda", torch.cuda.current_device())
    ticks = measuring._hand_over_ticks(device)
    assert 0.1 < np.median([measuring._busy_ms(ticks) for _ in range(5)]) < 0.4


@pytest.mark.gpu
def test_on_a_gpu_launches_are_hidden_where_a_call_is_queued():
    tiny = torch.zeros(8, device="cuda")
    seen, hidden = (
        np.median([Stopwatch("cuda", queued=queued).milliseconds(lambda: tiny.add_(1)) for _ in range(20)])
        for queued in (False, True)
    )
    assert hidden < 0.008
    assert hidden < 0.8 * seen


@pytest.mark.gpu
def test_on_a_gpu_what_is_left_on_another_stream_counts():
    square = torch.randn(4096, 4096, device="cuda")
    side = torch.cuda.Stream()

    def here():
        for _ in range(20):
            square @ square

    def elsewhere():
        with torch.cuda.stream(side):
            here()

    stopwatch = Stopwatch("cuda")
    for call in (here, elsewhere):
        settled(call, stopwatch)
    times = interleaved({"here": here, "elsewhere": elsewhere}, stopwatch, repeats=8)
    assert np.median(times["elsewhere"]) > 0.8 * np.median(times["here"])
