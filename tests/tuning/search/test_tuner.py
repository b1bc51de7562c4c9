"""Real worker processes, a real database, candidates that misbehave."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import sqlite3
import time
from pathlib import Path

import pytest
import torch
from misbehaving import CANDIDATES

from rocm_sd.ops import linear_geglu
from rocm_sd.tuning.database import Database
from rocm_sd.tuning.search import beside
from rocm_sd.tuning.search import tuner as tuner_module
from rocm_sd.tuning.search.candidates import Candidate
from rocm_sd.tuning.search.halving import strategy
from rocm_sd.tuning.search.tuner import Tuner, TunerOptions
from rocm_sd.tuning.search.watching import Watched, watched
from rocm_sd.workers import Worker

CPU = torch.device("cpu")
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def database(tmp_path):
    return Database(tmp_path / "tuning.sqlite3")


@pytest.fixture
def plugged(installed):
    """plugged(expression): the candidates of geglu that this list has."""

    def plug(expression: str, candidates: str = CANDIDATES) -> None:
        installed(
            candidates + f"\n    def candidates():\n        return {expression}\n",
            {"rocm_sd.candidates": {"misbehaving": "tuner_plugin:candidates"}},
        )

    return plug


def test_each_kind_of_harm_costs_one_candidate(plugged, database, geglu_call):
    harmful = ("nans", "wrong_once", "leaves_out", "raises", "aborts", "wrong_later")
    harm = ", ".join(f"of({n!r}, {n})" for n in (*harmful, "remembers"))
    # Asleep for much longer than stock computes: however busy the machine is, it is slower beyond doubt.
    plugged(f"[{harm}, of('sleeps', sleeps, ({{'ms': 20}},))]")
    # A quarter of a million results: one of them is wrong.
    (outcome,) = Tuner(CPU, database, TunerOptions(120)).run([geglu_call(512, 512)])
    reasons = {failure.candidate: failure.reason for failure in outcome.failures}
    assert set(reasons) == set(harmful)
    assert "nan" in reasons["nans"]
    assert reasons["wrong_once"].startswith("wrong: largest error 0.01")
    assert reasons["leaves_out"].startswith("wrong")
    assert reasons["raises"] == "ValueError: not today"
    assert reasons["aborts"].startswith(f"crashed by signal {signal.SIGABRT.value}")
    assert reasons["wrong_later"].startswith("wrong after it was timed")
    # The others went on, the faster one is chosen, and the slower one is known to be slower.
    assert outcome.chosen == Candidate("remembers")
    assert outcome.times_stock > 1.5
    assert outcome.complete
    stored = {entry.candidate: entry for entry in database.all()}
    assert set(stored) == {*harmful, "sleeps", "remembers", "torch"}
    assert {name for name, entry in stored.items() if entry.numerics == "ok"} == {"sleeps", "remembers", "torch"}
    slow = stored["sleeps"]
    assert slow.stock_us < slow.low_us <= slow.median_us
    best = database.best("geglu", dict(outcome.problem), slow.environment, "1")
    assert best.candidate == "remembers"


def test_one_that_hangs_is_stopped_and_the_next_one_goes_on(plugged, database, geglu_call):
    plugged("[of('hangs', hangs), of('sleeps', sleeps)]")
    (outcome,) = Tuner(CPU, database, TunerOptions(120, timeout_s=2.5)).run([geglu_call(8, 8)])
    (failure,) = outcome.failures
    assert (failure.candidate, failure.reason) == ("hangs", "hung: stopped after 2.5 s without an answer")
    assert outcome.complete
    stored = {entry.candidate: entry.numerics for entry in database.all()}
    assert stored == {"hangs": failure.reason, "sleeps": "ok", "torch": "ok"}


def test_one_that_hung_is_tried_again_in_the_next_run(plugged, database, geglu_call, monkeypatch, tmp_path):
    """It may have waited for a library's own search, which is done by then."""
    monkeypatch.setenv("HUNG_BEFORE", str(tmp_path / "hung"))
    plugged("[of('hangs_once', hangs_once)]")
    for expected in ("hung: stopped after 2.5 s without an answer", "ok"):
        (outcome,) = Tuner(CPU, database, TunerOptions(120, timeout_s=2.5)).run([geglu_call(8, 8)])
        assert {e.numerics for e in database.all() if e.candidate == "hangs_once"} == {expected}
    assert not outcome.failures


def test_a_librarys_search_at_the_first_call_is_no_hang(plugged, database, geglu_call, monkeypatch):
    """Stock's first call of a size is not within a candidate's seconds: MIOpen may search for minutes."""
    slow = """
    calls = []
    def searching(x, bias):
        calls.append(1)
        if len(calls) == 1:
            time.sleep(4)
        return stock(x, bias)
    op = OPS["geglu"]
    object.__setattr__(op.implementations[0], "run", searching)
    """
    plugged("[of('sleeps', sleeps)]", CANDIDATES + slow)
    (outcome,) = Tuner(CPU, database, TunerOptions(120, timeout_s=2.5)).run([geglu_call(8, 8)])
    assert not outcome.failures
    assert {entry.candidate: entry.numerics for entry in database.all()} == {"sleeps": "ok", "torch": "ok"}


def test_what_is_not_clearly_faster_is_stored_and_stock_is_chosen(plugged, database, geglu_call):
    plugged("[of('same', lambda x, bias, *, config: stock(x, bias)), of('sleeps', sleeps)]")
    (outcome,) = Tuner(CPU, database, TunerOptions(30)).run([geglu_call(64, 64)])
    stored = {entry.candidate: entry for entry in database.all()}
    assert {"same", "sleeps", "torch"} == set(stored)
    assert not stored["sleeps"].clearly_faster
    if not stored["same"].clearly_faster:  # an interval of 95% is wrong once in a while
        assert outcome.chosen == Candidate("torch")
        assert outcome.us == outcome.stock_us


def test_a_second_run_measures_nothing_and_fresh_measures_all(plugged, database, geglu_call, monkeypatch):
    plugged("[of('sleeps', sleeps, ({'ms': 1}, {'ms': 2}))]")
    traced = [geglu_call(8, 8)]
    (first,) = Tuner(CPU, database, TunerOptions(30)).run(traced)
    before = database.all()
    with monkeypatch.context() as changed:
        changed.setattr(Worker, "_start", None)  # not even a worker is started
        (second,) = Tuner(CPU, database, TunerOptions(30)).run(traced)
    assert (first.now > 0, second.now, second.complete) == (True, 0, True)
    assert database.all() == before
    (third,) = Tuner(CPU, database, TunerOptions(30, fresh=True)).run(traced)
    assert third.now >= 3
    assert {entry.when for entry in database.all()}.isdisjoint({entry.when for entry in before})


def test_what_was_fast_at_another_size_is_tried_first_and_timed_here(plugged, database, geglu_call):
    """The sizes of an earlier search are neighbours, too: of nine configs the two that were best there come first."""
    plugged("[of('sleeps', sleeps, tuple({'ms': ms} for ms in (9, 7, 3, 8, 5, 1, 6, 4, 2)))]")
    (first,) = Tuner(CPU, database, TunerOptions(60)).run([geglu_call(8, 8)])
    assert first.candidates == 10

    def in_order(options, call):
        tuner = Tuner(CPU, database, options)
        searches = tuner._searches([call])
        return [candidate.config.to_dict()["ms"] for candidate in tuner._in_order(searches[0], searches)]

    quick, near, other = TunerOptions(60, shortlist=2), geglu_call(16, 8), geglu_call(16, 8, torch.float64)
    assert in_order(quick, near) == [1, 2]
    assert in_order(TunerOptions(60), near) == [1, 2, 9, 7, 3, 8, 5, 6, 4]
    # Another dtype is no neighbour: all are tried.
    assert in_order(quick, other) == [9, 7, 3, 8, 5, 1, 6, 4, 2]
    # What is compiled where it runs costs seconds: in a quick search one of its configs is tried, the best there.
    (second,) = Tuner(CPU, database, quick).run([near])
    tried = {entry.config["ms"] for entry in database.all() if entry.problem["m"] == 16 and entry.config}
    assert tried == {1}
    assert (second.candidates, second.measured > 0, second.complete) == (10, True, False)
    # The rest is left to a search that goes through all, and measures no more than that.
    (third,) = Tuner(CPU, database, TunerOptions(60)).run([near])
    assert (third.candidates, third.complete) == (10, True)


class CompilesOneAtALook:
    """Instead of a compiler's processes: with each look at what is ready one more is, in the order that was asked for.

    Of the last, which is refused, a look is told, too.
    """

    def __init__(self, wanted, _device, _seconds):
        longest = max(len(candidates) for _, candidates, _ in wanted)
        several = [(call, c) for place in range(longest) for call, found, _ in wanted for c in found[place : place + 1]]
        self.waiting, self.done = several, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def is_ready(self, call, candidate):
        if len(self.waiting) > 1:
            self.done.append(self.waiting.pop(0))
        return (call, candidate) in self.done

    def has_failed(self, call, candidate):
        return self.is_over and (call, candidate) in self.waiting

    @property
    def is_over(self):
        return len(self.waiting) == 1


def test_a_search_looks_at_every_problem_first_and_then_goes_through_all(plugged, database, geglu_call, monkeypatch):
    plugged("[of('sleeps', sleeps, tuple({'ms': ms} for ms in (5, 4, 3, 2, 1)))]")
    for module in (tuner_module, beside):
        monkeypatch.setattr(module, "is_compiled_apart", lambda _op, candidate: candidate.implementation == "sleeps")
    monkeypatch.setattr(tuner_module, "CompilingBeside", CompilesOneAtALook)
    order, measured = [], Tuner.measured

    def noted(self, search, candidate, *rest):
        order.append((search.call.problem, candidate.config.to_dict().get("ms")))
        return measured(self, search, candidate, *rest)

    monkeypatch.setattr(Tuner, "measured", noted)
    outcomes = Tuner(CPU, database, TunerOptions(120)).run([geglu_call(8, 8), geglu_call(16, 8)])
    # One config of each problem, then others; all of them in the end, that which was refused, too.
    assert order[0][0] != order[1][0]
    assert [ms for _, ms in order[:2]] == [5, 5]
    assert [(each.complete, each.candidates) for each in outcomes] == [(True, 6), (True, 6)]
    assert {ms for _, ms in order} == {None, 1, 2, 3, 4, 5}


SLOW = "[of('sleeps', sleeps, tuple({'ms': ms} for ms in range(1, 13)))]"


def tuned(path, traced, budget_s):
    Tuner(CPU, Database(path), TunerOptions(budget_s)).run(traced)


def measured(path):
    """By key, as it is on disk: through a connection of its own."""
    if not path.exists():
        return {}
    database = Database(path)
    try:
        return {(e.op, str(e.problem), e.candidate, str(e.config)): e for e in database.all()}
    finally:
        database.close()


def test_two_kills_lose_nothing_measured(plugged, tmp_path, geglu_call):
    plugged(SLOW)
    path, traced = tmp_path / "killed.sqlite3", [geglu_call(8, 8)]
    chance = random.Random(8)
    known = {}
    for _ in range(2):
        more = len(known) + chance.randint(1, 3)
        process = FORK.Process(target=tuned, args=(path, traced, 60.0))
        process.start()
        while len(measured(path)) < more:
            # Each look opens the file: more often, it would take the time of the search.
            time.sleep(0.1)
            assert process.is_alive()
        time.sleep(chance.random() / 5)
        seen = measured(path)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        after = measured(path)
        assert set(known) <= set(seen) <= set(after)
        # What an earlier run had measured was not measured again on the way.
        assert all(after[key] == entry for key, entry in known.items())
        known = after
    (outcome,) = Tuner(CPU, Database(path), TunerOptions(60)).run(traced)
    assert outcome.complete
    assert len(measured(path)) == 13
    assert set(known) <= set(measured(path))
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_two_tuners_at_once(plugged, tmp_path, geglu_call):
    plugged("[of('sleeps', sleeps, tuple({'ms': ms} for ms in range(1, 5)))]")
    path, traced = tmp_path / "shared.sqlite3", [geglu_call(8, 8), geglu_call(16, 8)]
    both = [FORK.Process(target=tuned, args=(path, each, 60.0)) for each in (traced, traced[::-1])]
    for process in both:
        process.start()
    for process in both:
        process.join()
        assert process.exitcode == 0
    assert len(measured(path)) == 10
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_one_that_hung_or_crashed_is_not_tried_at_the_other_problems_of_the_run(plugged, database, geglu_call):
    """A model has dozens of sizes, and each would cost as many seconds, or another worker."""
    plugged("[of('hangs', hangs), of('aborts', aborts), of('sleeps', sleeps)]")
    first, second = Tuner(CPU, database, TunerOptions(120, timeout_s=2.5)).run([geglu_call(8, 8), geglu_call(16, 8)])
    reasons = sorted((f.candidate, f.reason.partition(":")[0]) for each in (first, second) for f in each.failures)
    left_out = "hung or crashed at another size"
    assert reasons == [
        ("aborts", "crashed by signal 6"), ("aborts", left_out), ("hangs", "hung"), ("hangs", left_out),
    ]  # fmt: skip
    assert first.chosen.is_stock
    assert second.chosen.is_stock


def test_the_budget_is_kept_even_where_the_last_candidate_hangs(plugged, database, geglu_call):
    plugged("[of('sleeps', sleeps, tuple({'ms': ms} for ms in range(60, 70))), of('hangs', hangs)]")
    shares = []
    tuner = Tuner(CPU, database, TunerOptions(6.0, timeout_s=60), lambda step: shares.append(step.share))
    begun = time.monotonic()
    (outcome,) = tuner.run([geglu_call(8, 8)])
    # Far below the 60 s that the candidate itself would be given, however busy the machine is.
    assert time.monotonic() - begun <= 6.0 + 6.0
    assert not outcome.complete
    assert 0 < outcome.measured < outcome.candidates
    # It was stopped by the end of the time, which is no fault of its own.
    assert "hangs" not in {entry.candidate for entry in database.all()}
    assert shares == sorted(shares)
    assert shares[-1] <= 1


class LooksAtTheClock:
    """A strategy that times nothing, and notes the seconds that are left when it is asked."""

    name = "looks-at-the-clock"

    def __init__(self):
        self.tuner, self.left_s = None, None

    def search(self, _candidates, _measure):
        self.left_s = self.tuner.left_s


@pytest.mark.parametrize(("spent_s", "left_s"), [(200.0, 340.0), (10_000.0, 240.0)])
def test_the_budget_counts_from_the_start_of_the_command_and_leaves_half_of_it(
    plugged, database, geglu_call, spent_s, left_s
):
    plugged("[of('sleeps', sleeps)]")
    strategy = LooksAtTheClock()
    strategy.tuner = Tuner(CPU, database, TunerOptions(600.0, strategy=strategy))
    (outcome,) = strategy.tuner.run([geglu_call(8, 8)], time.monotonic() - spent_s)
    # A tenth of the 600 s is kept for the candidate that is under way at the end.
    assert left_s - 60 < strategy.left_s <= left_s
    assert not outcome.complete


def test_ctrl_c_keeps_what_was_measured(plugged, database, geglu_call):
    plugged(SLOW)

    def interrupt(step):
        if len(database.all()) == 3:
            raise KeyboardInterrupt

    tuner = Tuner(CPU, database, TunerOptions(60), interrupt)
    (outcome,) = tuner.run([geglu_call(8, 8)])
    assert tuner.interrupted
    assert outcome.measured == len(database.all()) == 3


def test_a_worker_that_cannot_start_is_held_against_no_candidate(plugged, database, geglu_call, tmp_path, monkeypatch):
    plugged("[of('sleeps', sleeps, ({'ms': 1}, {'ms': 2}))]")
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'libamdhip64.so: no such file' >&2\nexit 127\n")
    broken.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(broken))
    begun = time.monotonic()
    (outcome,) = Tuner(CPU, database, TunerOptions(60)).run([geglu_call(8, 8)])
    assert outcome.unchecked == (
        "a worker could not be started: crashed with exit status 127; it last said: libamdhip64.so: no such file"
    )
    assert (outcome.measured, outcome.failures, database.all()) == (0, (), ())
    assert time.monotonic() - begun < 20


def test_the_example_in_the_documents_works(installed, database, geglu_call):
    page = (Path(__file__).parents[3] / "docs" / "plug-ins.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (points,) = re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    groups = re.findall(r'entry-points."([\w.]+)"\]\n([\w-]+) = "my_package:(\w+)"', points)
    installed(source, {group: {name: f"tuner_plugin:{value}"} for group, name, value in groups})
    options = TunerOptions(30, strategy=strategy("each-once"))
    (outcome, small) = Tuner(CPU, database, options).run([geglu_call(512, 64), geglu_call(16, 64)])
    assert (outcome.candidates, outcome.complete, outcome.failures) == (3, True, ())
    assert small.candidates == 1
    stored = {entry.candidate: entry for entry in database.all(op="geglu")}
    assert stored["in_pieces"].kernel_hash == "1"


@pytest.mark.gpu
def test_on_a_gpu_every_candidate_of_an_op_is_right_or_skipped(database, geglu_call):
    traced = geglu_call(4096, 1280, torch.float16)
    (outcome,) = Tuner(torch.device("cuda"), database, TunerOptions(60)).run([traced])
    assert outcome.measured > 1
    assert outcome.times_stock >= 1


def test_what_calls_other_ops_is_judged_once_more_after_them(database, monkeypatch):
    """`library_geglu` calls `geglu`, which costs less and is searched later."""
    seen, asked = Watched(), []
    with torch.no_grad(), watched(seen, answer_stock=True):
        linear_geglu(torch.randn(64, 32), torch.randn(64, 32), torch.randn(64))
    measured = Tuner.measured

    def noted(self, search, candidate, *rest):
        asked.append((search.op.name, candidate.implementation))
        return measured(self, search, candidate, *rest)

    monkeypatch.setattr(Tuner, "measured", noted)
    outcomes = Tuner(CPU, database, TunerOptions(60, confirmed=4)).run(seen.traced())
    assert {each.op for each in outcomes} == {"linear_geglu", "linear_residual", "geglu"}
    assert all(each.complete for each in outcomes)
    assert asked[-2:] == [("linear_geglu", "library_geglu"), ("linear_geglu", "torch")]
    assert asked.count(("linear_geglu", "library_geglu")) > 1
    # Nothing is left for a second run.
    asked.clear()
    Tuner(CPU, database, TunerOptions(60, confirmed=4)).run(seen.traced())
    assert asked == []
