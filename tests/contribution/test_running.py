"""Real processes that crash, hang and run out of memory: each costs one unit, and what is found is never lost."""

from __future__ import annotations

import os
import time

import pytest
import units_to_try as units

from rocm_sd.bench.card_report import FAILED, PASSED, SKIPPED
from rocm_sd.contribution import keeping, running
from rocm_sd.contribution.keeping import Found, Kept
from rocm_sd.contribution.running import PlannedPart, Run, Unit, plain_summary


@pytest.fixture
def kept(tmp_path):
    return Kept(tmp_path / "kept")


def part(*several: Unit, name: str = "part") -> PlannedPart:
    return PlannedPart(name, name, several, plain_summary)


def unit(name: str, work, *arguments, **options) -> Unit:
    return Unit(name, work, arguments, **{"limit_s": 60.0, "expected_s": 1.0, **options})


def run(kept: Kept, *parts: PlannedPart, budget_s: float = 300.0):
    made = Run(kept, budget_s)
    return made.parts(parts), made


def test_whatever_ends_a_process_costs_one_unit_and_is_recorded(kept):
    tried = part(
        unit("fine", units.fine, "fine"),
        unit("crash", units.crash),
        unit("killed", units.killed_for_memory),
        unit("memory", units.out_of_memory),
        unit("hang", units.hang, limit_s=1.0),
        unit("gone", units.wrong, "gone"),
        unit("after", units.fine, "after"),
        unit("here", units.out_of_memory, place="here"),
    )
    (found, other), _ = run(kept, tried, part(unit("next", units.fine, "next"), name="other"))
    assert other.state == PASSED
    states = {item.name: (item.state, item.reason) for item in found.items}
    assert states["fine"][0] == states["after"][0] == PASSED
    assert states["crash"] == (FAILED, "crashed by signal 11")
    assert states["killed"] == (FAILED, "crashed by signal 9 (it was killed, most likely for lack of memory)")
    assert states["memory"][1].startswith("out of memory: no room for")
    assert states["here"] == states["memory"]
    assert states["hang"] == (FAILED, "hung: stopped after 1 s without an answer")
    assert states["gone"] == (FAILED, "3 is not 4")
    assert found.state == FAILED
    assert found.summary == "2 of 8 passed"
    # The lines that led to it go along.
    assert any("out_of_memory" in line for line in found.data["tracebacks"]["memory"])


def test_after_a_failure_the_process_is_another_and_else_the_same(kept):
    tried = part(*(unit(name, work, name) for name, work in (
        ("one", units.fine), ("two", units.fine), ("wrong", units.wrong), ("three", units.fine),
    )))  # fmt: skip
    ((found,), _) = run(kept, tried)
    pids = {item.name: item.figures["pid"] for item in found.items}
    assert pids["one"] == pids["two"] == pids["wrong"] != pids["three"]
    assert os.getpid() not in pids.values()


def test_a_program_is_no_worker_and_both_measure_apart_from_the_user(kept):
    tried = part(unit("w", units.what_it_is), unit("p", units.what_it_is, place="program"))
    ((found,), _) = run(kept, tried)
    worker, program = (item.figures for item in found.items)
    assert (worker["inside"], program["inside"]) == ("True", "False")
    assert worker["cache"] == program["cache"] == str(kept.folder / "cache")
    assert 0 < program["left"] <= 60


def test_warnings_go_along(kept):
    ((found,), _) = run(kept, part(unit("warn", units.warn), unit("again", units.warn, place="here")))
    assert found.data["warnings"] == {name: ["conv2d falls back to stock"] for name in ("warn", "again")}


def test_what_was_found_is_not_found_again(kept, tmp_path):
    log = tmp_path / "log"
    tried = part(unit("one", units.fine, "one", str(log)), unit("bad", units.wrong, "bad"))
    first = run(kept, tried)[0]
    more = part(*tried.units, unit("two", units.fine, "two", str(log)))
    second, ended = run(Kept(kept.folder), more)
    assert log.read_text().split() == ["one", "two"]
    assert second[0].items[:2] == first[0].items
    assert ended.complete


def test_what_ended_the_program_is_tried_twice_and_then_recorded(kept):
    """Twice begun and never finished, as by a kernel that takes the machine down."""
    tried = part(unit("down", units.fine, "down"), unit("after", units.fine, "after"))
    kept.begin("part", "down")
    assert run(Kept(kept.folder), part(unit("x", units.fine, "x"), name="other"))[1].complete
    once_more = Kept(kept.folder)
    assert not once_more.was_its_end("part", "down")
    once_more.begin("part", "down")
    ((found,), _) = run(Kept(kept.folder), tried)
    assert (found.items[0].state, found.items[1].state) == (FAILED, PASSED)
    assert "ended twice while this ran" in found.items[0].reason


def test_ctrl_c_keeps_what_is_done_and_does_not_count_against_a_unit(kept, monkeypatch):
    def interrupted(*_arguments) -> Found:
        raise KeyboardInterrupt

    tried = part(unit("one", units.fine, "one", place="here"), unit("two", interrupted, place="here"))
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            run(Kept(kept.folder), tried)
    left = Kept(kept.folder)
    assert left.done == 1
    assert not left.was_its_end("part", "two")
    ((found,), _) = run(left, part(tried.units[0], unit("two", units.fine, "two", place="here")))
    assert found.state == PASSED


def test_a_budget_that_is_over_skips_the_rest_and_a_later_run_has_it(kept):
    tried = part(unit("long", units.fine, "long", expected_s=100.0), unit("short", units.fine, "short"))
    ((found,), ended) = run(kept, tried, budget_s=20.0)
    assert [(item.name, item.state) for item in found.items] == [("long", SKIPPED), ("short", PASSED)]
    assert found.items[0].reason == "the time was over before it was begun"
    assert found.summary == "1 of 1 passed; 1 not run: the time was over"
    assert not ended.complete
    ((found,), ended) = run(Kept(kept.folder), tried, budget_s=200.0)
    assert [item.state for item in found.items] == [PASSED, PASSED]
    assert ended.complete


def test_what_is_slow_is_cut_and_what_is_silent_hangs(kept, monkeypatch):
    monkeypatch.setattr(running, "_SILENT_S", 1.0)
    ((found,), ended) = run(kept, part(unit("slow", units.slow, expected_s=3.0)), budget_s=3.0)
    assert found.items[0].state == SKIPPED
    assert found.items[0].reason.startswith("the time was over after 3 s; it was at: step ")
    assert not ended.complete
    ((found,), ended) = run(kept, part(unit("hang", units.hang, expected_s=3.0)), budget_s=3.0)
    assert (found.items[0].state, found.items[0].reason) == (FAILED, "hung: stopped after 3 s without an answer")
    assert ended.complete


def test_progress_goes_from_nothing_to_all(kept):
    seen = []
    made = Run(kept, 100.0, lambda done, total, what: seen.append((done, total, what)))
    made.parts([part(unit("one", units.fine, "one"), unit("two", units.fine, "two"))])
    shares = [done / total for done, total, _ in seen]
    assert shares[0] == 0
    assert shares == sorted(shares)
    assert shares[-1] >= 0.5
    assert {what.split(",")[0] for _, _, what in seen} == {"part: one", "part: two"}


def test_a_state_that_cannot_be_read_starts_anew(tmp_path, caplog):
    for text in ("{", '{"format": "another", "begun": "", "units": []}', '{"units": 3}'):
        (tmp_path / "state.json").write_text(text)
        assert Kept(tmp_path).is_empty
    assert "starting anew" in caplog.text


def test_two_at_once_are_refused_and_a_fresh_one_forgets(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path))
    with keeping.keeping("key") as kept:
        kept.finish("part", "one", units.fine("one"), 1.0)
        with pytest.raises(keeping.InUse, match="Another rocm-sd contribute"), keeping.keeping("other"):
            pass
    with keeping.keeping("key") as kept:
        assert kept.done == 1
    with keeping.keeping("key", fresh=True) as kept:
        assert kept.is_empty
    # Nothing is left of one that has begun nothing.
    assert [path.name for path in (tmp_path / "contribution").iterdir()] == []


def test_a_pool_is_closed_with_the_run(kept):
    made = Run(kept, 100.0)
    made.parts([part(unit("one", units.fine, "one"))])
    assert made._pools == {}


def test_a_hang_does_not_hold_the_run_up(kept):
    begun = time.monotonic()
    run(kept, part(unit("hang", units.hang, limit_s=0.5)))
    assert time.monotonic() - begun < 60
