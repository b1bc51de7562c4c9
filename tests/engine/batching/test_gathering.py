"""Calls that are gathered from many threads: run together where they agree, in their order, and failing alone."""

from __future__ import annotations

import threading
import time

import pytest

from rocm_sd.engine.batching import Closed, Gathering


class Together:
    """Runs what is asked for, notes what it was given at once, and waits until it may."""

    def __init__(self, **options):
        self.batches = []
        self.may = threading.Event()
        self.gathering = Gathering("test", self._run, **{"most": 8, **options})

    def _run(self, items):
        self.batches.append(list(items))
        assert self.may.wait(10)
        return [self._one(item) for item in items]

    @staticmethod
    def _one(item):
        if item == "bad":
            raise ValueError("bad")
        return f"{item}!"

    def ask(self, *asked):
        """From a thread each, which begins when the one before waits: {item: answer or error}."""
        found, threads = {}, []

        def go(number, item, key, weight):
            try:
                found[number, item] = self.gathering.ask(item, key, weight)
            except Exception as error:  # noqa: BLE001 -- it is looked at
                found[number, item] = error

        for number, (item, key, weight) in enumerate(asked):
            threads.append(threading.Thread(target=go, args=(number, item, key, weight)))
            threads[-1].start()
            ends = time.monotonic() + 10
            # The first one runs, and the others wait for it in their order.
            while (not self.batches or self.gathering.waiting < number) and time.monotonic() < ends:
                time.sleep(0.001)
        self.may.set()
        for thread in threads:
            thread.join(10)
        return {item: answer for (_, item), answer in sorted(found.items(), key=lambda one: one[0][0])}


@pytest.fixture
def together():
    made = []

    def make(**options):
        made.append(Together(**options))
        return made[-1]

    yield make
    for one in made:
        one.may.set()
        one.gathering.close()


def test_those_with_one_key_are_run_at_once_and_the_first_ones_first(together):
    one = together()
    # The first is run by itself: nobody else was there.
    answers = one.ask(("first", 1, 1), ("a", 1, 1), ("b", 2, 1), ("c", 1, 1), ("d", 2, 1))
    assert one.batches == [["first"], ["a", "c"], ["b", "d"]]
    assert answers == {item: f"{item}!" for item in ("first", "a", "b", "c", "d")}


def test_nothing_without_a_key_is_run_with_others(together):
    one = together()
    one.ask(("first", 1, 1), ("a", None, 1), ("b", None, 1))
    assert one.batches == [["first"], ["a"], ["b"]]


def test_no_more_than_the_most_is_run_at_once_and_what_is_heavier_alone(together):
    one = together(most=4)
    one.ask(("first", 1, 1), ("a", 1, 3), ("b", 1, 2), ("c", 1, 1), ("d", 1, 9))
    assert one.batches == [["first"], ["a", "c"], ["b"], ["d"]]


def test_whoever_is_at_fault_fails_alone(together):
    one = together()
    answers = one.ask(*[(item, 1, 1) for item in ("first", "a", "b", "bad", "c")])
    assert isinstance(answers.pop("bad"), ValueError)
    assert answers == {item: f"{item}!" for item in ("first", "a", "b", "c")}
    assert one.batches[1:] == [["a", "b", "bad", "c"], ["a", "b"], ["bad", "c"], ["bad"], ["c"]]


def test_the_first_waits_as_long_as_patience_says_and_no_longer_than_until_all_are_there(together):
    expected = {"left": 1}
    one = together(patience=lambda _waiting: 5.0 if expected["left"] else 0.0)
    one.may.set()
    began = time.monotonic()
    threads = [threading.Thread(target=one.gathering.ask, args=(item, 1)) for item in ("a", "b")]
    threads[0].start()
    time.sleep(0.05)
    assert not one.batches
    expected["left"] = 0
    threads[1].start()
    for thread in threads:
        thread.join(10)
    assert one.batches == [["a", "b"]]
    assert time.monotonic() - began < 4
    one = together(patience=lambda _waiting: 0.05)
    one.may.set()
    began = time.monotonic()
    one.gathering.ask("a", 1)
    assert 0.05 <= time.monotonic() - began < 4


@pytest.mark.parametrize("asked", ["patience", "first"])
def test_where_nobody_can_say_who_is_next_all_that_wait_hear_why_and_later_ones_are_run(together, asked):
    def fails(waiting):
        if any(one.item == "odd" for one in waiting):
            raise KeyError("odd")
        return waiting[0] if asked == "first" else 0.0

    one = together(**{asked: fails})
    one.may.set()
    with pytest.raises(KeyError):
        one.gathering.ask("odd", 1)
    assert one.gathering.ask("a", 1) == "a!"


def test_what_waits_when_it_is_closed_is_told_so():
    one = Together()
    found = []

    def go(item):
        try:
            found.append(one.gathering.ask(item, item))
        except Closed:
            found.append("closed")

    threads = [threading.Thread(target=go, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    while not one.batches or one.gathering.waiting < 2:
        time.sleep(0.001)
    closing = threading.Thread(target=one.gathering.close)
    closing.start()
    one.may.set()
    for thread in (*threads, closing):
        thread.join(10)
    assert sorted(map(str, found))[-2:] == ["closed", "closed"]
    with pytest.raises(Closed):
        one.gathering.ask("later")
