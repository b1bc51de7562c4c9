"""The page of benchmarks shows what a record has: the card's own time is a column only where it was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import benchmarks_page
from rocm_sd.bench.records import Record

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "benchmarks/ablation-h200/sd15-512-ablation-earlier.json"


def shown(monkeypatch, *records):
    monkeypatch.setattr(benchmarks_page, "_records", lambda _pattern: [(f"{n}.json", r) for n, r in enumerate(records)])
    table = benchmarks_page.TABLES["bench-ablation"]()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]


def test_the_ablation_has_the_card_s_own_time_where_it_was_measured(monkeypatch):
    record = Record.load(RECORDED)
    without = tuple(replace(m, card_ms=None) for m in record.measurements)
    plain = shown(monkeypatch, replace(record, measurements=without))
    assert "card ms" not in plain[0]
    last = record.batches[-1]
    timed = tuple(replace(m, card_ms=m.p50_ms / 2 if m.batch == last else None) for m in without)
    timed = (*timed[:-1], replace(timed[-1], ms=(), card_ms=None, left_out="out of memory"))
    heads, rule, *rows = shown(monkeypatch, replace(record, measurements=timed))
    assert heads.count("card ms") == 1
    place = heads.index("card ms")
    assert heads[place - 1] == f"batch {last}: ms"
    assert rule[place] == "---:"
    assert all(len(row) == len(heads) for row in rows)
    # The other columns are what they were.
    assert [row[:place] + row[place + 1 :] for row in rows[:-1]] == plain[2:-1]
    engine = record.engines[0]
    assert rows[0][place] == f"{record.measurement(engine, last).p50_ms / 2:.0f}"
    assert rows[-1][place] == ""


def test_an_interrupted_run_is_called_so(monkeypatch):
    record = Record.load(RECORDED)
    for table in ("bench-engines", "bench-ablation"):
        for complete in (True, False):
            found = [("a.json", replace(record, complete=complete))]
            monkeypatch.setattr(benchmarks_page, "_records", lambda _pattern, found=found: found)
            assert ("`a.json` (interrupted)" in benchmarks_page.TABLES[table]()) is not complete
