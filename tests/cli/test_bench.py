from __future__ import annotations

import gc
import json
from dataclasses import replace

import pytest
import torch

from rocm_sd.bench import engines, runner, workloads
from rocm_sd.bench.records import Record
from rocm_sd.cli import main

TINY = ("sd15-512", "--tiny", "--device", "cpu", "--steps", "1", "--repeats", "4")


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def rocm_sd(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main.run(["bench", *arguments])
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """One real run of the command, for the tests that read what it left."""
    out = tmp_path_factory.mktemp("measured")
    work = workloads.make("sd15-512", torch.device("cpu"), tiny=True, steps=1)
    return work, runner.run(work, engines.chosen(["stock", "rocm-sd"], work.device), [1], out=out, repeats=4)


@pytest.fixture
def no_timing(monkeypatch, measured):
    """The command with a workload and a record as it would make them, and what it was asked for."""
    asked = {}

    def run(workload, selected, batches, **options):
        asked.update(options, workload=workload, engines=[e.name for e in selected], batches=batches)
        return asked.get("record", measured[1])

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(workloads, "make", lambda *_, **options: asked.update(made=options) or measured[0])
    return asked


def test_help_has_examples_and_options(capsys):
    assert rocm_sd("--help") == 0
    shown = capsys.readouterr().out
    assert "rocm-sd bench sd15-512 --batch 1,8 --engines stock,compile,rocm-sd" in shown
    for option in (
        "--batch", "--engines", "--model", "--steps", "--repeats", "--cold", "--out", "--csv", "--markdown", "--json",
        "--resume", "--fresh", "--against", "--ablation", "--submit", "--list",
    ):  # fmt: skip
        assert option in shown


def test_list_names_workloads_and_engines(capsys):
    assert rocm_sd("--list", "--device", "cpu") == 0
    shown = capsys.readouterr().out
    for words in ("sdxl-mlperf", "op:NAME", "compile_max", "yes, by default", "conv2d"):
        assert words in shown


def test_a_real_run_writes_all_three_and_shows_the_table(tmp_path, capsys):
    assert rocm_sd(*TINY, "--batch", "1", "--out", str(tmp_path)) == 0
    printed = capsys.readouterr()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "sd15-512-tiny.csv", "sd15-512-tiny.json", "sd15-512-tiny.md",
    ]  # fmt: skip
    record = Record.load(tmp_path / "sd15-512-tiny.json")
    assert record.command == "rocm-sd bench sd15-512 --steps 1 --repeats 4 --tiny"
    assert record.engines == ("stock", "rocm-sd")
    assert str(tmp_path) not in (tmp_path / "sd15-512-tiny.json").read_text()
    for words in ("stock", "rocm-sd", "times stock", "memory", "error", "random weights", "wrote"):
        assert words in printed.out
    # One table, one sentence, and what to type next.
    assert printed.out.count("┏") == 1
    *_, verdict, wrote, then = printed.out.splitlines()
    assert verdict.startswith(f"sd15-512-tiny on {record.machine.device}: rocm-sd ")
    assert verdict.endswith(", and is as exact.")
    assert wrote == f"wrote {tmp_path / 'sd15-512-tiny.json'}, and the same as .csv and .md with every figure"
    assert then == f"To see it as a page, type: rocm-sd report {tmp_path}"


def test_a_real_ablation_is_run_from_the_command_line(tmp_path, capsys, monkeypatch):
    # Most of the time went into warm-ups, which test_measuring.py is about, and into garbage among imported modules.
    real = runner.settled
    monkeypatch.setattr(runner, "settled", lambda call, watch, **_: real(call, watch, least=1, most=1))
    gc.collect()
    gc.freeze()
    assert rocm_sd(*TINY, "--ablation", "--out", str(tmp_path)) == 0
    record = Record.load(tmp_path / "sd15-512-tiny-ablation.json")
    assert (record.kind, record.complete) == ("ablation", True)
    assert record.command == "rocm-sd bench sd15-512 --steps 1 --repeats 4 --ablation --tiny"
    assert "GroupNorm" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "start"),
    [("--csv", "engine,version,provider,batch,"), ("--markdown", "sd15-512-tiny: 64x64"), ("--json", "{")],
)
def test_formats_leave_nothing_else_on_standard_output(no_timing, tmp_path, capsys, option, start):
    assert rocm_sd(*TINY, option, "--out", str(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(start)
    if option == "--json":
        assert json.loads(shown)["kind"] == "engines"


def test_verbose_shows_every_column_as_before(no_timing, tmp_path, capsys):
    assert rocm_sd(*TINY, "--verbose", "--out", str(tmp_path)) == 0
    shown = capsys.readouterr().out
    for words in ("p90", "interval", "first-run", "by rocm-sd"):
        assert words in shown
    assert shown.count("┏") == 3


def test_in_80_columns_nothing_is_wider_but_paths_and_no_colour_is_in_a_pipe(no_timing, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    assert rocm_sd(*TINY) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    # Its own folder needs no argument.
    assert shown.endswith("To see it as a page, type: rocm-sd report\n")


def test_bench_then_report_needs_no_argument_between_them(no_timing, measured, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # As in a checkout, whose own records are not what was just measured.
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "old.json").write_text("{")
    assert rocm_sd(*TINY) == 0
    measured[1].save(tmp_path / "out" / "sd15-512-tiny.json")
    with pytest.raises(SystemExit) as ended:
        main.run(["report"])
    assert not ended.value.code
    assert "from out/sd15-512-tiny.json" in capsys.readouterr().out
    assert "sd15-512-tiny" in (tmp_path / "report.html").read_text()


def test_options_reach_the_run(no_timing, tmp_path):
    out = ("--out", str(tmp_path))
    assert rocm_sd(*TINY, "--batch", "1,8,1", "--engines", "stock, channels_last", "--cold", "--fresh", *out) == 0
    assert no_timing["batches"] == (1, 8)
    assert no_timing["engines"] == ["stock", "channels_last"]
    assert (no_timing["repeats"], no_timing["cold"], no_timing["resume"]) == (4, True, False)
    assert no_timing["out"] == tmp_path
    assert no_timing["made"] == {"model": None, "steps": 1, "tiny": True, "time_loading": True}
    assert "--engines stock, channels_last" in no_timing["command"]


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        ((), 2, "rocm-sd bench --list"),
        (("sd99",), 2, "workload 'sd99' is not known"),
        (("sd15-512",), 6, "Try the command with a small model: rocm-sd bench sd15-512 --tiny"),
        (("op:none",), 2, "op 'none' is not known"),
        (("op:geglu", "--steps", "3"), 3, "does not support --steps"),
        (("op:geglu", "--ablation"), 3, "does not support --ablation"),
        (("emoji", "--batch", "0"), 2, "--batch 1,8"),
        (("emoji", "--batch", "x"), 2, "--batch 1,8"),
        (("emoji", "--engines", "magic"), 2, "engine 'magic' is not known"),
        (("emoji", "--csv", "--json"), 2, "print one"),
        (("emoji", "--ablation", "--engines", "stock"), 2, "rows of its own"),
        (("emoji", "--against", "/nowhere.json"), 1, "is not a benchmark record"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_timed(tmp_path, capsys, arguments, code, sentence):
    assert rocm_sd(*arguments, "--device", "cpu", "--out", str(tmp_path)) == code
    printed = capsys.readouterr().err
    assert sentence in printed
    assert "Traceback" not in printed
    assert not list(tmp_path.iterdir())


def test_ctrl_c_says_how_to_go_on(monkeypatch, tmp_path, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", interrupted)
    assert rocm_sd(*TINY, "--out", str(tmp_path)) == 130
    printed = " ".join(capsys.readouterr().err.split())
    assert f"What was measured is kept in {tmp_path}; to go on, type the same command again." in printed


def test_a_wrong_engine_is_exit_code_7(no_timing, measured, tmp_path, capsys):
    stock, ours = measured[1].measurements
    wrong = replace(ours, ms=(), left_out="wrong result: the error of the latents is 0.5")
    no_timing["record"] = replace(measured[1], measurements=(stock, wrong), comparisons=())
    assert rocm_sd(*TINY, "--out", str(tmp_path)) == 7
    printed = capsys.readouterr()
    assert "1 result(s) were wrong, and were not timed: rocm-sd: wrong result" in printed.err
    assert "rocm-sd was skipped: wrong result" in printed.out
    # No speed is claimed in the verdict.
    assert ": rocm-sd was skipped: wrong result: the error of the latents is 0.5.\n" in printed.out
    assert "times as fast" not in printed.out


def slower(record: Record, times: float) -> Record:
    slowed = tuple(
        replace(m, ms=tuple(times * ms for ms in m.ms)) if m.engine == "rocm-sd" else m for m in record.measurements
    )
    return replace(record, measurements=slowed)


def steady(record: Record) -> Record:
    """Turns as a quiet machine has them: what the test asks is the command's answer, not this machine's noise."""
    ms = tuple(100 + 0.1 * (turn % 3) for turn in range(10))
    return replace(record, measurements=tuple(replace(m, ms=ms) for m in record.measurements))


def test_a_regression_is_exit_code_1_with_a_table(no_timing, measured, tmp_path, capsys):
    before = tmp_path / "before.json"
    steady(measured[1]).save(before)
    no_timing["record"] = steady(measured[1])
    assert rocm_sd(*TINY, "--out", str(tmp_path / "out"), "--against", str(before)) == 0
    assert "No regression" in capsys.readouterr().err
    no_timing["record"] = slower(steady(measured[1]), 1.5)
    assert rocm_sd(*TINY, "--out", str(tmp_path / "out"), "--against", str(before)) == 1
    printed = capsys.readouterr().err
    assert "Regressions" in printed
    assert "beyond the interval; the worst is rocm-sd, batch 1: time against stock" in printed


def test_another_workload_is_not_compared(no_timing, measured, tmp_path, capsys):
    before = tmp_path / "before.json"
    record = measured[1]
    replace(record, workload=replace(record.workload, name="sdxl-1024")).save(before)
    assert rocm_sd(*TINY, "--out", str(tmp_path / "out"), "--against", str(before)) == 1
    assert "The two records cannot be compared: the workload was sdxl-1024" in capsys.readouterr().err


def test_an_op_from_the_command_line(tmp_path, capsys, monkeypatch):
    from rocm_sd.ops import OPS

    op = OPS["geglu"]
    monkeypatch.setitem(
        OPS, "geglu", replace(op, verification=replace(op.verification, small=op.verification.small[:1]))
    )
    assert rocm_sd("op:geglu", "--device", "cpu", "--repeats", "6", "--out", str(tmp_path), "--markdown") == 0
    assert "geglu" in capsys.readouterr().out
    assert Record.load(tmp_path / "op-geglu.json").kind == "op"


def test_a_contribution_needs_agreement(no_timing, measured, tmp_path, capsys, monkeypatch):
    from rocm_sd.bench.submission import STATEMENT

    target = tmp_path / "mine.json"
    options = (*TINY, "--out", str(tmp_path / "out"), "--submit", str(target))
    monkeypatch.setattr("typer.confirm", lambda *_, **__: False)
    assert rocm_sd(*options) == 1
    printed = capsys.readouterr().err
    assert STATEMENT.split("\n")[0][:60] in printed
    assert "needs your agreement" in printed
    assert "workload" not in no_timing, "it was asked for before the run"


def test_a_contribution_is_written_when_agreed(no_timing, tmp_path, monkeypatch):
    from rocm_sd.bench import submission

    written = []
    monkeypatch.setattr(submission, "write", lambda record, path: written.append((record, path)) or path)
    assert rocm_sd(*TINY, "--out", str(tmp_path), "--submit", str(tmp_path / "mine.json"), "--sign-off") == 0
    assert written[0][1] == tmp_path / "mine.json"
    assert written[0][0].kind == "engines"
