from __future__ import annotations

import json
import sqlite3
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from rocm_sd.bench import workloads
from rocm_sd.cli import main
from rocm_sd.cli.tune_tables import show_known, show_outcomes
from rocm_sd.engine import calibration, optimize, report
from rocm_sd.engine.calibration import plan_times
from rocm_sd.kernels.config import OpenConfig
from rocm_sd.ops import OPS
from rocm_sd.tuning import database_file, resolve
from rocm_sd.tuning.database import Database, Entry
from rocm_sd.tuning.environment import Environment
from rocm_sd.tuning.ranking import RatedConfig
from rocm_sd.tuning.search.candidates import Candidate
from rocm_sd.tuning.search.tuner import Failure, TuningResult
from rocm_sd.tuning.static import sweep
from rocm_sd.tuning.static.data_files import BucketResult

pytest.importorskip("triton", reason="AMD code is compiled by Triton")

WHEN = {"hw": [1, 256]}
BEST = RatedConfig(OpenConfig.fitting({"tile": 32}), 5.25, figures={"vgprs": 40, "lds": 64, "waves_per_simd": 16})
NEXT = replace(BEST, config=OpenConfig.fitting({"tile": 64}), modelled_us=7.5)
SPILLED = RatedConfig(OpenConfig.fitting({"tile": 512}), dropped="spills: _apply: 3 VGPRs and 0 SGPRs spilled")


def rocm_sd(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main.run(list(arguments))
    return int(ended.value.code or 0)


@pytest.fixture
def searched(monkeypatch):
    """What the search finds, and what it was asked for, without the hours that it may take."""
    asked = {}

    def use(*found):
        def tune(planned, out, *, jobs, progress):
            asked.update(archs={s.arch for s in planned.buckets}, out=out, jobs=jobs)
            progress("group_norm_silu gfx1100")
            return list(found)

        monkeypatch.setattr(sweep, "tune", tune)
        return asked

    return use


def test_help_has_examples(capsys):
    assert rocm_sd("tune", "--help") == 0
    shown = capsys.readouterr().out
    assert "rocm-sd tune --static group_norm_silu --arch gfx1100,gfx942" in shown
    for option in ("--sizes", "--batch", "--budget", "--list", "--static", "--arch", "--out", "--jobs", "--json"):
        assert option in shown


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    """No measurement of this machine's user is read or written."""
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "cache"))
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "0")
    return tmp_path / "cache" / "tuning.sqlite3"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["no-such-model"], "There is no model at no-such-model"),
        (["sd15-512", "--device", "cpu"], "rocm-sd tune sd15-512-tiny"),
        (["emoji", "conv2d"], "Give one model; ops are named by --ops"),
        (["--budget", "soon"], "Give a time: 90s, 2m or 1h"),
        (["--budget", "0"], "Give a time: 90s, 2m or 1h"),
        (["--sizes", "512"], "Give widths and heights"),
        (["--sizes", "500x300"], "Sides are multiples of 8"),
        (["--batch", "0"], "sizes of 1 or more"),
        (["--batch", "9" * 5000], "sizes of 1 or more"),
        (["--ops", "no_such_op"], "op 'no_such_op' is not known"),
        (["--strategy", "guessing"], "Use one of: halving"),
        (["--arch", "gfx1100"], "A search runs on this card"),
        (["--jobs", "2"], "compiles on all cores but two"),
        (["--import", "no-such-file.json"], "It cannot be read"),
        (["--export", "no-such-folder/tuned.json"], "It cannot be written"),
    ],
)
def test_a_search_that_cannot_begin_says_what_to_type(own_cache, capsys, arguments, sentence):
    assert rocm_sd("tune", *arguments) in {2, 4, 6}
    shown = " ".join(capsys.readouterr().err.split())
    assert sentence in shown


def test_a_search_is_stored_listed_and_moved(own_cache, capsys, tmp_path, monkeypatch):
    arguments = ("tune", "sd15-512-tiny", "--ops", "memory_format,attention", "--budget", "5m", "--device", "cpu")
    assert rocm_sd(*arguments, "--json") == 0
    outcomes = json.loads(capsys.readouterr().out)
    assert {o["op"] for o in outcomes} == {"memory_format", "attention"}
    assert all(o["measured"] == o["candidates"] == 2 and not o["failures"] for o in outcomes)
    assert all(o["times_stock"] >= 1 for o in outcomes)
    assert rocm_sd("tune", "--list", "--json", "--device", "cpu") == 0
    listed = json.loads(capsys.readouterr().out)
    assert len(listed) == len(outcomes)
    # Elsewhere: the same is known there without a search.
    assert rocm_sd("tune", "--export", str(tmp_path / "tuned.json")) == 0
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "other"))
    assert rocm_sd("tune", "--list", "--device", "cpu") == 0
    assert "Nothing was measured" in capsys.readouterr().out
    assert rocm_sd("tune", "--import", str(tmp_path / "tuned.json")) == 0
    capsys.readouterr()
    assert rocm_sd(*arguments) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "; 0 measurements in" in shown
    assert "On a CPU there is little to choose" in shown
    assert "memory_format" in shown


def test_with_no_argument_what_was_drawn_with_is_tuned(own_cache, capsys, monkeypatch):
    """Its ops and its plans, in one pass; `optimize` goes by them in the next process."""
    monkeypatch.setenv("ROCM_SD_CALIBRATE", "1")
    made = workloads.make("sd15-512", torch.device("cpu"), tiny=True)
    with monkeypatch.context() as noted_only:
        noted_only.setattr(calibration, "wanted", lambda _device, **_named: False)
        made.picture(optimize(made.pipeline()), 1)
    arguments = ("tune", "--ops", "attention", "--budget", "60s", "--device", "cpu")
    # Two that measure one card would measure one another: its ops are stored, its plans are not.
    with plan_times.alone():
        assert rocm_sd(*arguments) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Whole models were not timed: another process measures its card now." in shown
    assert rocm_sd(*arguments) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "b=2 s=64" in shown
    for kind in ("UNet2DConditionModel (2x4x8x8 float32", "Decoder (1x4x8x8 float32"):
        assert kind in shown
    assert "measured here on" in shown
    pipe = optimize(made.pipeline())
    measured = [note for note in report(pipe).notes if "measured here on" in note]
    # A plan that lays convolutions out anew is the reason of that note, too.
    assert all(any(note.startswith(kind) for note in measured) for kind in ("UNet2DConditionModel", "Decoder"))
    assert rocm_sd("tune", "--list", "--json", "--device", "cpu") == 0
    plans = [row for row in json.loads(capsys.readouterr().out) if row["op"] == "plan"]
    assert {row["problem"]["model"].split()[0] for row in plans} == {"UNet2DConditionModel", "Decoder"}
    assert all(row["us"] <= row["stock_us"] for row in plans)


def test_a_batch_beyond_all_memory_ends_before_it_begins(own_cache, capsys):
    assert rocm_sd("tune", "--batch", "99999999", "--budget", "1s", "--device", "cpu") == 1
    assert "A batch of 99999999 with pictures of 128x128 takes" in capsys.readouterr().err


def an_entry(**named) -> Entry:
    given = {
        "op": "conv2d", "problem": {"n": 2}, "kernel_hash": "", "candidate": "torch", "config": {}, "median_us": 2.0,
        "low_us": 1.0, "high_us": 3.0, "stock_us": 2.0, "numerics": "ok", "when": "2026-01-01T00:00:00+00:00",
        "environment": Environment("gfx1100", 96, None, "rocm 7.1.0", "2.11.0", "3.6.0", None),
    }  # fmt: skip
    return Entry(**{**given, **named})


def _damaged(path):
    path.write_bytes(b"this was never a database " * 400)


def _of_later(path):
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()


def _no_database(path):
    path.unlink()


@pytest.mark.parametrize("spoil", [_damaged, _of_later, _no_database])
def test_a_backup_is_not_replaced_by_a_database_that_lost_what_it_held(own_cache, capsys, tmp_path, spoil):
    backup = tmp_path / "backup.json"
    before = Database(own_cache)
    before.put([an_entry(), an_entry(op="geglu")])
    before.close()
    resolve._database.cache_clear()
    assert rocm_sd("tune", "--export", str(backup)) == 0
    content = backup.read_bytes()
    resolve.user_database().close()
    for tail in ("-wal", "-shm"):
        own_cache.with_name(own_cache.name + tail).unlink(missing_ok=True)
    spoil(own_cache)
    # Again: what the first command renamed is not there for the second.
    for _ in range(2):
        resolve._database.cache_clear()
        capsys.readouterr()
        assert rocm_sd("tune", "--export", str(backup)) == 1
        assert backup.read_bytes() == content
        said = " ".join(capsys.readouterr().err.split())
        assert "cannot be read" in said or "2 measurements that the database has not" in said
    if spoil is not _of_later:
        assert rocm_sd("tune", "--import", str(backup)) == 0
        assert rocm_sd("tune", "--export", str(backup)) == 0
        assert backup.read_bytes() == content


def test_an_import_into_a_database_that_is_locked_is_no_success(own_cache, capsys, tmp_path, monkeypatch):
    source = Database(tmp_path / "source.sqlite3")
    source.put([an_entry()])
    source.export_json(tmp_path / "tuned.json")
    Database(own_cache).put([an_entry(op="geglu")])
    monkeypatch.setattr(database_file, "BUSY_S", 0.1)
    resolve._database.cache_clear()
    other = sqlite3.connect(own_cache, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    assert rocm_sd("tune", "--import", str(tmp_path / "tuned.json")) == 1
    shown = capsys.readouterr()
    assert "taken" not in shown.out
    said = " ".join(shown.err.split())
    assert "1 measurements were read, and none is kept" in said
    assert "Close what else uses it" in said
    other.close()
    assert [each.op for each in Database(own_cache).all()] == ["geglu"]


def test_what_failed_and_what_is_left_is_named(capsys):
    failure = Failure("triton block=256", "crashed by signal 11")
    tried = TuningResult("geglu", {"m": 8}, 3, Candidate("mine"), 5.0, 10.0, 4, 3, 3, False, (failure,))
    unchecked = TuningResult(
        "attention", {"s": 9}, 1, Candidate("torch"), None, None, 4, 0, 0, False, (), "too little memory"
    )
    show_outcomes(Console(width=200), [tried, unchecked], 12.0, on_cpu=False)
    shown = capsys.readouterr().out
    for words in (
        "2.00", "1 of 2 problems run faster than stock torch", "1 problem is not searched to the end",
        "skipped triton block=256 (geglu m=8): crashed by signal 11", "not searched attention s=9: too little memory",
    ):  # fmt: skip
        assert words in shown


def test_figures_are_whole_in_80_columns(capsys):
    wide = {"pixels": 262144, "cin": 1920, "cout": 1280, "kernel": 3, "stride": 1, "padding": 1, "dtype": "bfloat16"}
    best = Candidate("library_epilogue", OpenConfig.fitting({"block_m": 128, "block_n": 256}))
    first, last = (
        TuningResult("conv2d", {**wide, "cin": cin}, 3, best, 104857.6, 314572.8, 4, 3, 3, True, ())
        for cin in (64, 1920)
    )
    between = TuningResult("memory_format", {}, 1, Candidate("torch"), 1.5, 1.5, 1, 1, 1, True, ())
    show_outcomes(Console(width=80), [first, between, last], 12.0, on_cpu=False)
    known = {"op": "conv2d", "problem": wide, "chosen": "library_epilogue", "us": 104857.6, "stock_us": 314572.8}
    out = {f"triton {n}": "wrong" for n in range(12)}
    show_known(Console(width=80), [{**known, "candidates": 144, "left_out": out, "when": "2026-11-16T05:00:00"}])
    shown = capsys.readouterr().out
    assert "…" not in shown
    rows = [line for line in shown.splitlines() if line.startswith("│")]
    assert {len(row) for row in rows} == {80}
    # What is of one op stands together, under its name.
    assert [row.split()[1] for row in rows if "=" not in row] == ["conv2d", "memory_format", "whole", "conv2d"]
    for figure in ("library_epilogue", "104857.6", "314572.8", "3.00", "144, 12 out", "last on 2026-11-16"):
        assert figure in shown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["no_such_op"], "op 'no_such_op' is not known"),
        (["--arch", "gfx9999"], "architecture 'gfx9999' is not known"),
        (["--jobs", "0"], "Invalid value for '--jobs'"),
    ],
)
def test_what_is_not_known_is_exit_code_2(capsys, arguments, sentence):
    assert rocm_sd("tune", "--static", *arguments) == 2
    assert sentence in capsys.readouterr().err


def test_the_table_has_the_winner_and_its_figures(searched, capsys, tmp_path):
    asked = searched(BucketResult("group_norm_silu", "gfx1100", WHEN, "2x320x64x64", (BEST, NEXT, SPILLED)))
    arguments = ("group_norm_silu", "--arch", "gfx1100,gfx942", "--out", str(tmp_path), "--jobs", "2")
    assert rocm_sd("tune", "--static", *arguments) == 0
    assert asked == {"archs": {"gfx1100", "gfx942"}, "out": tmp_path, "jobs": 2}
    shown = " ".join(capsys.readouterr().out.split())
    for word in ("gfx1100", "tile=32", "5.2", "7.5", "40", "VGPRs", "Modelled, never timed."):
        assert word in shown
    assert str(tmp_path) in shown


def test_a_size_without_a_config_is_exit_code_1_with_every_reason(searched, capsys):
    lost = BucketResult("group_norm_silu", "gfx1101", WHEN, "2x320x64x64", (SPILLED,))
    searched(BucketResult("group_norm_silu", "gfx1100", WHEN, "2x320x64x64", (BEST,)), lost)
    assert rocm_sd("tune", "--static", "group_norm_silu", "--json") == 1
    shown = capsys.readouterr()
    first, second = json.loads(shown.out)
    assert (first["ranked"][0]["config"], first["error"]) == ({"tile": 32}, None)
    assert second["unusable"] == [{"config": {"tile": 512}, "because": SPILLED.dropped}]
    assert "1 of 2 sizes have no usable config" in shown.err
    assert 'group_norm_silu on gfx1101, {"hw": [1, 256]}: all 1 configs were dropped: spills: _apply' in shown.err
    assert "smaller tile" in shown.err


def test_a_real_search_from_the_command_line(monkeypatch, capsys, tmp_path):
    op = OPS["group_norm_silu"]
    (config, *_rest) = sweep.plan([op.name], ["gfx1100"]).buckets[0].configs
    tuning = replace(op.tuning, space=lambda _problem, _arch: [config], buckets=op.tuning.buckets[:1])
    monkeypatch.setitem(OPS, op.name, replace(op, tuning=tuning))
    assert rocm_sd("tune", "--static", op.name, "--arch", "gfx1100", "--out", str(tmp_path), "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["op"], found["arch"], found["compiled"]) == (op.name, "gfx1100", 1)
    written = json.loads((tmp_path / "gfx1100" / f"{op.name}.json").read_text())
    assert written["bucket"][0]["config"] == found["ranked"][0]["config"] == config.to_dict()
