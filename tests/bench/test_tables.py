from __future__ import annotations

import csv
import io
from dataclasses import replace

import pytest
from rich.console import Console

from rocm_sd.bench import tables
from rocm_sd.bench.records import INTERVALS, Comparison, Machine, Measurement, Record, WorkloadFacts

FACTS = WorkloadFacts("sd15-512", "sd15", "random", 512, 512, 50, "DDIMScheduler", 7.5, "float16", 1e12)
MACHINE = Machine("A card", "gfx1100", 96, 24576, None, "Linux", {"torch": "2.13"})
STOCK = Measurement(
    "stock", "torch 2.13", "torch", 2, (1000.0, 1010.0, 1020.0), 50, 4.5, 6.25, 2466.4, 2400.0,
    power_watt=300.0, floor_ms=101.0, error=1e-3, stock_error=1e-3,
)  # fmt: skip
OURS = replace(STOCK, engine="rocm-sd", version="rocm-sd 0.1.0", ms=(500.0, 505.0, 530.0))
WRONG = Measurement("wrong", "1", "it", 2, (), 50, error=0.5, left_out="wrong result: 0.5 | 0.001")
COMPARISON = Comparison("rocm-sd", "stock", 2, 2.0, 1.9, 2.1, "faster")
RECORD = Record(
    "engines", FACTS, MACHINE, "rocm-sd bench sd15-512 --batch 2", "2026-01-01T00:00:00+00:00", (STOCK, OURS, WRONG),
    (COMPARISON, Comparison("rocm-sd", "other", 2, 9.0, 8.0, 10.0, "faster")),
)  # fmt: skip


def shown(record, width=200):
    console = Console(width=width, file=io.StringIO())
    console.print(tables.rich_tables(record))
    return console.file.getvalue()


def test_csv_has_every_column_of_the_issue():
    stock, ours, wrong = csv.DictReader(io.StringIO(tables.csv_text(RECORD)))
    assert ours["engine"] == "rocm-sd"
    assert (ours["version"], ours["provider"], ours["batch"]) == ("rocm-sd 0.1.0", "torch", "2")
    # The average, the median and the 90th percentile of 500, 505 and 530 ms for two pictures of 50 steps.
    assert (ours["average ms"], ours["p50 ms"], ours["p90 ms"]) == ("511.7", "505", "530")
    assert (ours["images/s"], ours["it/s"]) == ("3.960", "99.01")
    assert (ours["first-run MiB"], ours["second-run MiB"]) == ("2466", "2400")
    assert (ours["first picture s"], ours["warm-up s"]) == ("4.5", "6.2")
    # 300 W for 0.505 s, halved; 101 of 505 ms.
    assert (ours["power W"], ours["J/image"], ours["% of floor"]) == ("300", "75.8", "20.0")
    assert (ours["error"], ours["stock's error"]) == ("1.00e-03", "1.00e-03")
    assert (ours["x stock"], ours["x stock low"], ours["x stock high"]) == ("2.000", "1.900", "2.100")
    assert ours["verdict"] == "faster"
    assert stock["x stock"] == ""
    assert (stock["model"], stock["size"], stock["steps"]) == ("sd15", "512x512", "50")
    assert (stock["load s"], stock["load again s"]) == ("", ""), "random weights are not loaded"
    assert wrong["left out"].startswith("wrong result")


@pytest.mark.parametrize("text", [tables.markdown, tables.csv_text, shown])
def test_no_speed_is_shown_of_what_was_skipped(text):
    # Even a record that holds timings of a wrong result, which the runner never writes.
    printed = text(replace(RECORD, measurements=(replace(WRONG, ms=(123.0,)),)))
    assert "wrong result" in printed
    assert "123" not in printed


def test_markdown_is_a_table_with_the_ratio_and_its_interval():
    lines = tables.markdown(RECORD).splitlines()
    assert lines[0] == (
        "sd15-512: 512x512, 50 steps DDIMScheduler, guidance 7.5, float16, random weights, on A card (gfx1100)"
    )
    heads, rule, *rows = (line for line in lines if line.startswith("|"))
    assert heads.startswith("| engine | version | provider | batch | average ms | p50 ms | p90 ms |")
    assert rule.count("-|") == heads.count("|") - 1
    # A bar inside a cell would end it.
    assert all(row.replace("\\|", "").count("|") == heads.count("|") for row in rows)
    assert "2.000 (1.900 to 2.100)" in rows[1]
    assert "skipped" in rows[2]
    assert any(line.startswith("- wrong was skipped at batch 2: wrong result") for line in lines)


def test_columns_with_nothing_in_them_are_not_shown():
    record = replace(RECORD, measurements=tuple(replace(m, power_watt=None) for m in RECORD.measurements))
    assert "power W" in tables.markdown(RECORD)
    assert "power W" not in tables.markdown(record)
    assert "J/image" in shown(RECORD)
    assert "J/image" not in shown(record)
    assert "power W" in tables.csv_text(record), "a program wants the same columns every time"


def test_no_difference_is_said_in_words():
    none = replace(COMPARISON, ratio=1.01, low=0.98, high=1.05, verdict="no difference")
    record = replace(RECORD, comparisons=(none,))
    assert "1.010 (0.980 to 1.050), no difference" in tables.markdown(record)
    assert "0.980 to 1.050 │ no difference" in shown(record)
    assert all("the interval contains 1" in printed for printed in (tables.markdown(record), shown(record)))


def test_a_terminal_shows_all_tables_and_the_interruption():
    printed = shown(replace(RECORD, complete=False))
    for words in ("A card (gfx1100)", "images/s", "99.01", "first-run", "2466", "This run was interrupted"):
        assert words in printed
    assert "stock: torch 2.13, by torch; rocm-sd: rocm-sd 0.1.0, by torch" in printed
    # In 80 columns nothing is cut off.
    longest = replace(RECORD.measurements[0], engine="channels_last")
    narrow = shown(replace(RECORD, measurements=(*RECORD.measurements, longest)), width=80)
    assert max(map(len, narrow.splitlines())) <= 80
    for words in ("511.7", "99.01", "1.900 to 2.100", "1.00e-03", "2466", "75.8"):
        assert words in narrow
    assert "…" not in narrow


def test_an_op_has_a_row_for_each_call():
    record = replace(RECORD, kind="op", op_cases=("conv2d a", "conv2d b"))
    row = tables.rows(record)[0]
    assert (row["batch"], row["images/s"]) == ("conv2d b", "")
    assert (row["model"], row["size"], row["steps"]) == ("sd15", "", "")
    assert "conv2d b" in shown(record)


def test_the_card_s_own_time_is_a_column_where_a_row_has_it():
    with_it = replace(RECORD, measurements=(STOCK, replace(OURS, card_ms=412.34), WRONG))
    heads, _, stock, ours, wrong = (line for line in tables.markdown(with_it).splitlines() if line.startswith("|"))
    place = heads.split(" | ").index("card ms")
    assert [row.split(" | ")[place] for row in (stock, ours, wrong)] == ["", "412.3", ""]
    assert next(csv.DictReader(io.StringIO(tables.csv_text(replace(with_it, measurements=(OURS,))))))["card ms"] == ""
    assert [row["card ms"] for row in csv.DictReader(io.StringIO(tables.csv_text(with_it)))] == ["", "412.3", ""]
    printed = shown(with_it, width=80)
    assert "412.3" in printed
    assert "card" not in tables.markdown(RECORD).replace("A card", "")
    assert "card" not in shown(RECORD).replace("A card", "")
    # In a narrow terminal it takes the mean's place, and names are not torn.
    named = replace(with_it, measurements=tuple(replace(m, engine="residual epilogues") for m in (STOCK, OURS)))
    named = replace(named, measurements=(named.measurements[0], replace(named.measurements[1], card_ms=412.34)))
    assert "│ residual" in shown(named, width=80)
    assert "average" in shown(RECORD)
    assert "average" not in printed


def test_a_time_of_the_card_is_not_shown_of_what_was_skipped():
    assert "99.5" not in tables.markdown(replace(RECORD, measurements=(replace(WRONG, card_ms=99.5),)))


def test_below_the_table_stands_what_an_interval_is():
    assert f"- {INTERVALS}" in tables.markdown(RECORD)
    assert INTERVALS in shown(RECORD)
    assert INTERVALS not in tables.markdown(replace(RECORD, comparisons=()))
    assert "95% interval" not in tables.markdown(RECORD) + shown(RECORD)
