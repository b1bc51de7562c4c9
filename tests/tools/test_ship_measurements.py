"""Which measurements of a card are taken into the shipped data, and which are not."""

from __future__ import annotations

import json

import pytest

import ship_measurements
from ship_measurements import main, taken_in

PROBLEM = {"m": 64, "dtype": "float16"}
SMALL, LARGE = {"block": 16}, {"block": 64}


def measured(candidate, us, *, config=None, stock_us=100.0, spread=0.01, numerics="ok", problem=None):
    return {
        "op": "linear",
        "problem": problem or dict(sorted(PROBLEM.items())),
        "environment": {"arch": "sm_90"},
        "candidate": candidate,
        "config": config or {},
        "median_us": us,
        "low_us": us * (1 - spread),
        "high_us": us * (1 + spread),
        "stock_us": stock_us,
        "numerics": numerics,
    }


def table(implementation="triton", config=SMALL, *, exact=True):
    entry = {"implementation": implementation, "config": config, "why": "before"}
    return {
        "op": "linear",
        "arch": "sm_90",
        "exact": [{"when": dict(PROBLEM), **entry}] if exact else [],
        "bucket": [{"when": {"m": [1, 99]}, **entry}],
        "static": entry,
    }


def chosen(made):
    (entry,) = made["exact"]
    return entry["implementation"], entry["config"]


def test_a_shape_that_a_bucket_served_gets_the_fastest():
    made = table(exact=False)
    assert taken_in(made, [measured("triton", 130, config=SMALL), measured("triton", 80, config=LARGE)]) == 1
    assert chosen(made) == ("triton", LARGE)
    assert list(made["exact"][0]["when"].items()) == list(dict(sorted(PROBLEM.items())).items())
    assert made["exact"][0]["why"] == "measured: 80.0 us, stock 100.0 us"


def test_stock_is_named_where_nothing_is_faster_beyond_doubt_and_the_kernel_keeps_its_best_config():
    made = table(exact=False)
    found = [
        measured("triton", 130, config=SMALL),
        measured("triton", 99.5, config=LARGE),
        measured("library", 98.0, spread=0.03),
    ]
    assert taken_in(made, found) == 1
    assert chosen(made) == ("torch", LARGE)


def test_a_library_has_the_config_of_the_kernel_beside_it():
    made = table(exact=False)
    assert taken_in(made, [measured("triton", 90, config=LARGE), measured("library", 70)]) == 1
    assert chosen(made) == ("library", LARGE)


@pytest.mark.parametrize(
    ("own_us", "other_us", "changed"),
    [(80.0, 79.5, 0), (80.0, 70.0, 1), (120.0, 130.0, 1), (100.5, 130.0, 0)],
    ids=["as fast", "another is faster", "slower than stock", "perhaps slower than stock"],
)
def test_an_entry_for_the_shape_stays_unless_it_is_contradicted_beyond_doubt(own_us, other_us, changed):
    made = table()
    found = [measured("triton", own_us, config=SMALL), measured("triton", other_us, config=LARGE)]
    assert taken_in(made, found) == changed
    assert (made["exact"][0]["why"] == "before") is (not changed)


def test_what_is_wrong_or_was_never_timed_beside_stock_counts_for_nothing():
    made = table(exact=False)
    wrong = measured("triton", 10, config=LARGE, numerics="wrong in one value")
    alone = measured("library", 10, stock_us=None)
    assert taken_in(made, [wrong, alone, measured("torch", 100)]) == 0
    assert not made["exact"]


def test_a_file_that_has_no_data_is_skipped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ship_measurements, "DATA", tmp_path)
    (tmp_path / "sm_90").mkdir()
    file = tmp_path / "sm_90" / "linear.json"
    file.write_text(json.dumps(table(exact=False)))
    export = tmp_path / "export.json"
    other = {**measured("triton", 1), "op": "unknown"}
    export.write_text(json.dumps({"measurements": [measured("triton", 80, config=LARGE), other]}))
    main([str(export)])
    assert capsys.readouterr().out.splitlines() == [
        "linear on sm_90: 1 entries taken in",
        "unknown on sm_90: no data to add to; skipped",
    ]
    assert chosen(json.loads(file.read_text())) == ("triton", LARGE)
