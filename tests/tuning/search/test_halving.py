from __future__ import annotations

import random

import pytest

from rocm_sd.errors import InvalidOption
from rocm_sd.tuning.search.candidates import Candidate
from rocm_sd.tuning.search.halving import Halving, strategies, strategy


class Simulated:
    """Times with noise that falls with the root of the turns; each turn costs one of `budget`."""

    def __init__(self, times: dict[Candidate, float | None], budget: float = 1e9, noise: float = 0.1) -> None:
        self.times, self.budget, self.noise, self.spent = times, budget, noise, 0
        self.turns: dict[Candidate, int] = {}
        self._random = random.Random(3)

    def __call__(self, candidate: Candidate, turns: int) -> float | None:
        self.spent += turns
        time = self.times[candidate]
        if time is None:
            return None
        self.turns[candidate] = turns
        return time * (1 + self._random.gauss(0, self.noise) / turns**0.5)

    def left(self) -> float:
        return 1 - self.spent / self.budget


def named(count: int) -> list[Candidate]:
    return [Candidate("triton", (("number", number),)) for number in range(count)]


@pytest.mark.parametrize("best", [0, 17, 49])
def test_it_finds_the_best_of_many_for_a_fraction_of_the_turns(best):
    candidates = named(50)
    times: dict[Candidate, float | None] = {c: 1.0 + 0.01 * i for i, c in enumerate(candidates)}
    times[candidates[best]] = 0.8
    measure = Simulated(times)
    Halving().search(candidates, measure)
    often = [c for c, turns in measure.turns.items() if turns == Halving().last]
    assert candidates[best] in often
    assert len(often) == 6  # of 50, 17 in the second round
    assert measure.spent < 50 * Halving().last / 2


def test_those_that_fail_go_no_further():
    candidates = named(9)
    times: dict[Candidate, float | None] = dict.fromkeys(candidates)
    times[candidates[5]] = 2.0
    measure = Simulated(times)
    Halving().search(candidates, measure)
    assert measure.turns == {candidates[5]: Halving().last}


def test_all_may_fail():
    candidates = named(4)
    measure = Simulated(dict.fromkeys(candidates))
    Halving().search(candidates, measure)
    assert measure.turns == {}


def test_a_short_budget_still_times_what_looks_best_well():
    candidates = named(100)
    times: dict[Candidate, float | None] = {c: 1.0 + 0.01 * i for i, c in enumerate(candidates)}
    measure = Simulated(times, budget=200, noise=0.001)
    Halving().search(candidates, measure)
    assert 200 * 0.6 <= measure.spent <= 200 + Halving().last
    assert len(measure.turns) < 100
    assert measure.turns[candidates[0]] > Halving().first


def test_one_that_is_installed_is_found_by_name(installed, caplog):
    installed(
        """
        class EachOnce:
            name = "each-once"

            def search(self, candidates, measure):
                for candidate in candidates:
                    measure(candidate, 8)

        class Twice(EachOnce):
            name = "each-twice"

        class Nameless:
            pass

        def several():
            return [Twice(), EachOnce()]
        """,
        {"rocm_sd.search_strategies": {
            "each-once": "tuner_plugin:EachOnce", "bad": "tuner_plugin:Nameless", "gone": "tuner_plugin:Missing",
            "several": "tuner_plugin:several",
        }},
    )  # fmt: skip
    assert set(strategies()) == {"halving", "each-once", "each-twice"}
    assert "the strategy each-once of tuner_plugin:several is skipped: there is one of that name" in caplog.text
    assert "the strategy bad is skipped" in caplog.text
    assert "the strategy gone is skipped" in caplog.text
    measure = Simulated(dict.fromkeys(named(3), 1.0))
    strategy("each-once").search(named(3), measure)
    assert measure.spent == 24


def test_one_that_is_not_there():
    with pytest.raises(InvalidOption, match="halving"):
        strategy("guessing")
