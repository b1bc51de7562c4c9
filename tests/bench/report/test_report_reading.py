from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import made_up
import pytest

from rocm_sd.bench.records import UnreadableRecord
from rocm_sd.bench.report import page
from rocm_sd.bench.report.reading import UnreadableLadder, read, read_ladder

ROOT = Path(__file__).parents[3]


def saved(folder: Path, record, name: str = "record.json") -> Path:
    record.save(folder / name)
    return folder / name


def spoiled(folder: Path, change) -> Path:
    """A record with one value replaced, as JSON allows and a dataclass does not notice."""
    values = json.loads(json.dumps(made_up.engines().to_dict()))
    change(values)
    path = folder / "spoiled.json"
    path.write_text(json.dumps(values))
    return path


def test_records_and_both_formats_of_ops_are_read(tmp_path):
    files = [saved(tmp_path, made_up.engines(), "a.json"), saved(tmp_path, made_up.op(), "b.json")]
    inputs = read([*files, ROOT / "benchmarks/ops-h200/geglu.json"])
    assert [record.kind for record in inputs.records] == ["engines"]
    new, old = inputs.op_runs
    assert [(t.op, t.call) for t in new.timings] == [
        ("conv2d", "2x320x64x64 to 4, 3x3, bias add residual, float16"),
        ("geglu", "512x5120, float16"),
    ]
    assert new.timings[0].ours == pytest.approx(16.0, rel=0.03)
    assert new.timings[0].stock == pytest.approx(34.0, rel=0.03)
    assert (old.device, old.arch) == ("NVIDIA H200", "sm_90")
    assert old.timings[0].ours == pytest.approx(8.64, rel=0.01)
    assert old.timings[0].stock == pytest.approx(34.72, rel=0.01)


def test_where_stock_was_picked_its_time_is_ours(tmp_path):
    run = read([ROOT / "benchmarks/ops-h200/attention.json"]).op_runs[0]
    picked = [timing for timing in run.timings if timing.implementation == "torch"]
    assert picked
    assert all(timing.ours == timing.stock for timing in picked)


def test_a_folder_is_searched_and_what_is_no_record_is_named(tmp_path):
    saved(tmp_path, made_up.engines(), "deep/down.json")
    (tmp_path / "notes.json").write_text('{"a": 1}')
    (tmp_path / "broken.json").write_text("{")
    inputs = read([tmp_path])
    assert len(inputs.records) == 1
    assert set(inputs.skipped) == {"notes.json", "broken.json"}


def test_folders_may_stand_among_the_files(tmp_path):
    one = saved(tmp_path, made_up.engines(), "one/engines.json")
    saved(tmp_path, made_up.engines(), "two/engines.json")
    (tmp_path / "two" / "notes.json").write_text('{"a": 1}')
    inputs = read([one, tmp_path / "one", tmp_path / "two"])
    assert len(inputs.records) == 2
    assert inputs.skipped == ("notes.json",)


def test_a_file_that_is_named_and_in_the_folder_counts_once(tmp_path):
    path = saved(tmp_path, made_up.engines())
    assert len(read([path, path, tmp_path]).records) == 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda r: r["measurements"][0]["ms"].insert(0, float("nan")), "measurements[0].ms[0] should be number"),
        (lambda r: r["measurements"][0]["ms"].insert(0, -1.0), "measurements[0].ms[0] is not above 0"),
        (lambda r: r["measurements"][0]["ms"].insert(0, "1"), "measurements[0].ms[0] should be number"),
        (lambda r: r["measurements"][0].update(batch="8"), "measurements[0].batch should be integer"),
        (lambda r: r["measurements"][0].update(batch=0), "measurements[0].batch is below 1"),
        (lambda r: r["measurements"][0].update(error=float("inf")), "measurements[0].error should be number or null"),
        (lambda r: r["measurements"][0].update(error=-1.0), "measurements[0].error is below 0"),
        (lambda r: r["measurements"][0].update(left_out="wrong"), "was skipped and has timings"),
        (lambda r: r["measurements"][0].update(ms=[]), "has neither timings nor a reason"),
        (lambda r: r["comparisons"][0].update(ratio=float("nan")), "comparisons[0].ratio should be number"),
        (lambda r: r["comparisons"][0].update(low=9.0, high=1.0), "is inside out"),
        (lambda r: r["comparisons"][0].update(verdict="great"), "comparisons[0].verdict should be one of"),
        (lambda r: r.update(kind="dance"), "kind should be one of ['engines'"),
        (lambda r: r["machine"].update(versions=[]), "machine.versions should be object"),
        (lambda r: r.update(command=None), "command should be string"),
        (lambda r: r.update(owner="ann"), "owner is not known"),
        (lambda r: r.pop("machine"), "the file has no machine"),
    ],
)
def test_a_broken_record_is_named_with_what_is_wrong(tmp_path, change, why):
    path = spoiled(tmp_path, change)
    for named in (path, tmp_path):
        with pytest.raises(UnreadableRecord) as failed:
            read([named])
        assert str(path) in failed.value.message
        assert why in failed.value.message


@pytest.mark.parametrize(
    ("text", "why"),
    [("{", "is not a benchmark record"), ("[]", "its format is neither"), ("\xff", "is not a benchmark")],
)
def test_a_file_that_is_no_record_is_an_error_when_it_is_named(tmp_path, text, why):
    path = tmp_path / "file.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UnreadableRecord, match=why):
        read([path])


def test_a_broken_file_of_ops_is_named(tmp_path):
    values = json.loads((ROOT / "benchmarks/ops-h200/geglu.json").read_text())
    del values["rows"][0]["us"]
    (tmp_path / "ops.json").write_text(json.dumps(values))
    with pytest.raises(UnreadableRecord, match="a field is missing"):
        read([tmp_path / "ops.json"])


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        "[]",
        "[1]",
        '[{"op": "a"}]',
        '[{"op": "a", "arch": "b", "rung": "compiled", "state": "fine", "sentence": ""}]',
        '[{"op": "a", "arch": "b", "rung": "x", "state": "passed", "sentence": "", "figures": {"vgprs": "many"}}]',
    ],
)
def test_a_ladder_that_is_none_is_named(tmp_path, text):
    path = tmp_path / "ladder.json"
    path.write_text(text)
    with pytest.raises(UnreadableLadder) as failed:
        read_ladder(path)
    assert str(path) in failed.value.message
    assert "rocm-sd verify --json" in failed.value.hint


def leaves(value, path=()):
    """Where every value of a JSON document stands, lists and mappings among them."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from leaves(inner, (*path, key))


@pytest.mark.parametrize("kind", ["engines", "ablation", "op", "gpus"])
def test_whatever_stands_in_a_record_it_is_refused_by_name_or_shown(tmp_path, kind):
    if kind == "gpus":
        record = made_up.gpus(32)
        record = replace(record, ways=tuple(replace(way, ms=way.ms[:4]) for way in record.ways))
    else:
        record = {"engines": made_up.engines(batches=(1,)), "ablation": made_up.ablation(), "op": made_up.op()}[kind]
        short = tuple(replace(m, ms=m.ms[:4]) for m in record.measurements if kind == "op" or m.batch == 1)[-4:]
        record = replace(record, measurements=short, comparisons=record.comparisons[:1])
    text = json.dumps(record.to_dict())
    path = tmp_path / "record.json"
    outcomes = Counter()
    for place in leaves(json.loads(text)):
        for strange in (None, "x", -1, 1e400, True, [[]]):
            values = json.loads(text)
            holder = values
            for key in place[:-1]:
                holder = holder[key]
            if place:
                holder[place[-1]] = strange
            path.write_text(json.dumps(values if place else strange))
            try:
                inputs = read([path])
            except UnreadableRecord:
                outcomes["refused"] += 1
                continue
            assert page(inputs), place
            outcomes["shown"] += 1
    assert min(outcomes["refused"], outcomes["shown"]) > 50
