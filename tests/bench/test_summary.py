"""The table of rocm-sd bench and its verdict: true of every record, and within the terminal."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from rocm_sd.bench import summary
from rocm_sd.bench.records import Comparison, Machine, Measurement, Record, WorkloadFacts
from rocm_sd.bench.verdict import Quality

FACTS = WorkloadFacts("emoji", "sd15", "random", 512, 512, 50, "DDIMScheduler", 7.5, "float16", 1e12)
MACHINE = Machine("A card", "gfx1100", 96, 24576, None, "Linux", {"torch": "2.13"})
STOCK = Measurement(
    "stock", "torch 2.13", "torch", 1, (1000.0, 1010.0, 1020.0), 50, 4.5, 6.25, 2466.4, 2400.0,
    power_watt=300.0, error=1e-3, stock_error=1e-3,
)  # fmt: skip
OURS = replace(STOCK, engine="rocm-sd", version="rocm-sd 0.1.0", ms=(500.0, 505.0, 530.0))
WRONG = Measurement("wrong", "1", "it", 1, (), 50, error=0.5, left_out="wrong result: 0.5 | 0.001")
FASTER = Comparison("rocm-sd", "stock", 1, 2.0, 1.9, 2.1, "faster")
RECORD = Record("engines", FACTS, MACHINE, "rocm-sd bench emoji", "2026-01-01", (STOCK, OURS), (FASTER,))


def shown(record, width=80):
    console = Console(width=width, file=io.StringIO())
    console.print(summary.SummaryTable(record))
    return console.file.getvalue()


def test_one_table_has_speed_interval_memory_error_and_the_first_picture():
    table = shown(RECORD)
    assert table.count("┏") == 1
    assert max(map(len, table.splitlines())) <= 80
    for words in ("505", "2.00 (1.90-2.10)", "1.980", "2400", "1.0e-03", "4.5"):
        assert words in table
    assert "batch" not in table
    assert "…" not in table


def test_what_has_no_room_gives_way_and_the_ratio_stays():
    named = replace(RECORD, measurements=(STOCK, OURS, replace(STOCK, engine="residual epilogues", card_ms=412.3)))
    table = shown(named)
    assert max(map(len, table.splitlines())) <= 80
    assert "│ residual epilogues │" in table
    assert "412.3" in table
    assert "2.00 (1.90-2.10)" in table
    assert "4.5" not in table
    narrow = shown(named, 50)
    assert max(map(len, narrow.splitlines())) <= 50
    assert "505" in narrow
    assert "4.5" in shown(named, 120)


def test_two_batches_have_a_column_and_lossy_engines_their_pictures():
    high = replace(OURS, engine="rocm-sd-high", quality=Quality("high", "x", (40.0, 41.0), (0.99, 0.99)))
    two = replace(RECORD, measurements=(STOCK, OURS, high, replace(STOCK, batch=8), replace(OURS, batch=8)))
    table = shown(two)
    assert "batch" in table
    assert "within high" in table
    assert max(map(len, table.splitlines())) <= 80


def test_no_speed_is_shown_of_what_was_skipped():
    record = replace(RECORD, measurements=(STOCK, replace(WRONG, ms=(123.0,))))
    assert "123" not in shown(record)
    assert "skipped" in shown(record)
    assert summary.notes(record) == ["wrong was skipped: wrong result: 0.5 | 0.001"]


def test_an_interval_that_ends_near_one_has_three_places():
    near = replace(FASTER, ratio=1.05, low=1.003, high=1.1)
    assert "1.05 (1.003-1.100)" in shown(replace(RECORD, comparisons=(near,)))
    assert "(1.003 to 1.100)" in summary.verdict(replace(RECORD, comparisons=(near,)))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "emoji on A card: rocm-sd is 2.00 times as fast as stock (1.90 to 2.10), and is as exact."),
        (
            {"comparisons": (replace(FASTER, ratio=0.8, low=0.7, high=0.9, verdict="slower"),)},
            "emoji on A card: rocm-sd is slower than stock, 0.80 times its speed (0.70 to 0.90), and is as exact.",
        ),
        (
            {"comparisons": (replace(FASTER, ratio=1.02, low=0.9, high=1.1, verdict="no difference"),)},
            (
                "emoji on A card: rocm-sd shows no difference from stock beyond the spread (0.90 to 1.10), "
                "and is as exact."
            ),
        ),
        (
            {"complete": False},
            "emoji on A card so far: rocm-sd is 2.00 times as fast as stock (1.90 to 2.10), and is as exact.",
        ),
        # Nothing is said of an exactness that nobody measured.
        (
            {"measurements": (STOCK, replace(OURS, error=None))},
            "emoji on A card: rocm-sd is 2.00 times as fast as stock (1.90 to 2.10).",
        ),
        (
            {"measurements": (STOCK, replace(OURS, ms=(), left_out="wrong result: 0.5")), "comparisons": ()},
            "emoji on A card: rocm-sd was skipped: wrong result: 0.5.",
        ),
        (
            {"measurements": (STOCK,), "comparisons": ()},
            "emoji on A card: stock takes 1010 ms, and rocm-sd was not compared with stock.",
        ),
        ({"measurements": (), "comparisons": ()}, "emoji on A card: nothing was timed."),
        (
            {
                "measurements": (STOCK, OURS, replace(STOCK, batch=8), replace(OURS, batch=8)),
                "comparisons": (FASTER, replace(FASTER, batch=8, ratio=1.5, low=1.4, high=1.6)),
            },
            (
                "emoji on A card: rocm-sd is 2.00 times as fast as stock (1.90 to 2.10) at batch 1 and is 1.50 "
                "times as fast as stock (1.40 to 1.60) at batch 8, and is as exact."
            ),
        ),
        (
            {
                "kind": "ablation",
                "measurements": tuple(replace(OURS, engine=name) for name in ("attention", "step graph", "compile")),
                "comparisons": tuple(
                    Comparison(name, "attention", 1, ratio, 1.9, 9.0, "faster")
                    for name, ratio in (("step graph", 8.0), ("compile", 4.0))
                ),
            },
            (
                "emoji on A card: rocm-sd (step graph) is 8.00 times as fast as stock (attention) (1.90 to 9.00), "
                "and is as exact."
            ),
        ),
        (
            {
                "kind": "op",
                "op_cases": ("conv2d a", "conv2d b"),
                "measurements": (STOCK, OURS, replace(STOCK, batch=2), replace(WRONG, engine="rocm-sd", batch=2)),
            },
            (
                "emoji on A card: 1 of 1 calls are faster than stock's, 0 slower, 0 without a difference beyond the "
                "spread; 1 was skipped."
            ),
        ),
    ],
)
def test_the_verdict_is_one_sentence(changed, expected):
    assert summary.verdict(replace(RECORD, **changed)) == expected


def test_an_interrupted_run_and_what_disturbed_it_are_told():
    told = summary.notes(replace(RECORD, complete=False, notes=("The machine was busy.",)))
    assert told == ["The machine was busy.", "This run was interrupted: the figures are of the turns that it had."]


def test_an_op_has_a_row_for_each_call_and_its_ratio_in_any_terminal():
    calls = ("conv2d " + "2x320x64x64 by 320x320x3x3, float16, with a residual " * 2, "conv2d b")
    wrong = (replace(WRONG, engine="stock", batch=2), replace(WRONG, engine="rocm-sd", batch=2))
    record = replace(RECORD, kind="op", op_cases=calls, measurements=(STOCK, OURS, *wrong))
    table = shown(record)
    assert max(map(len, table.splitlines())) <= 80
    assert "2.00 (1.90-2.10)" in table
    assert table.count("skipped") == 2
    # What neither can do is told once.
    assert summary.notes(record) == ["conv2d b was skipped: wrong result: 0.5 | 0.001"]
