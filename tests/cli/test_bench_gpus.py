"""rocm-sd bench WORKLOAD --gpus N: the command on processes of a CPU, what it writes, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta

import pytest
import torch

from rocm_sd.bench import several_gpus
from rocm_sd.bench import several_gpus_tables as tables
from rocm_sd.bench.records import OURS, STOCK, UnreadableRecord
from rocm_sd.bench.several_gpus_record import TOGETHER, GpusRecord, Way
from rocm_sd.cli import bench_gpus, main
from rocm_sd.parallel import launching

EMOJI = ("emoji", "--gpus", "2", "--device", "cpu", "--steps", "1", "--repeats", "2")
real_measure = bench_gpus.measure_on_rank


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def bench(*arguments) -> int:
    with pytest.raises(SystemExit) as ended:
        main.run(["bench", *map(str, arguments)])
    return int(ended.value.code or 0)


def wrong_on_rank_1(pipe, plan):
    """Ranks draw each for itself, and one of them something else."""
    pipe = real_parallelize(pipe, plan="data")
    if torch.distributed.get_rank() == 1:
        pipe.unet.conv_out.weight.mul_(1.001)
    return pipe


real_parallelize = several_gpus.parallelize


def measure_three(device, asked, file):
    """What was asked for; then in the same processes, since starting them takes seconds, another plan and a fault."""
    several_gpus._MOST_WARM_UPS = 3
    real_measure(device, asked, file)
    small = replace(asked, workload="sd15-512", tiny=True, parallel="data", repeats=1)
    real_measure(device, small, file.with_name("data.json"))
    several_gpus.parallelize = wrong_on_rank_1
    real_measure(device, small, file.with_name("wrong.json"))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """One real run of the command: its folder, and what it returned."""
    out = tmp_path_factory.mktemp("measured")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_gpus, "measure_on_rank", measure_three)
        return out, bench(*EMOJI, "--out", out)


@pytest.fixture
def no_run(monkeypatch):
    """The command without its ranks: the record is `record[0]`, where there is one."""
    record = []

    def launch(_ranks, _entry, _asked, file, *, device):
        record[0].save(file)

    monkeypatch.setattr(launching, "launch", launch)
    return record


def test_a_picture_on_two_ranks(measured):
    out, code = measured
    assert code == 0
    record = GpusRecord.load(out / "emoji-2-gpus.json")
    assert record.command == "rocm-sd bench emoji --gpus 2 --steps 1 --repeats 2 --device cpu"
    assert str(out) not in (out / "emoji-2-gpus.json").read_text()
    assert record.machine.versions["torch"] == torch.__version__
    assert (record.plan, record.why) == ("cfg=2", "each half of guidance has a rank, and one answer a step is sent")
    assert (record.ranks, record.pictures, record.link) == (2, 1, None)
    assert [(way.name, way.ranks, len(way.ms)) for way in record.ways] == [
        (STOCK, 1, 2), (OURS, 1, 2), (TOGETHER, 2, 2),
    ]  # fmt: skip
    assert all(0 < way.error <= 2.1 * way.stock_error for way in record.ways)
    # A half of guidance each, 4 channels of 32 x 32 in float32.
    assert record.sent["cfg"] == 2 * 4 * 32 * 32 * 4
    assert record.sent["vae"] > 0


def test_what_is_shown_of_it(measured, no_run, tmp_path, capsys):
    no_run.append(GpusRecord.load(measured[0] / "emoji-2-gpus.json"))
    assert bench(*EMOJI, "--out", tmp_path) == 0
    # A caption has no more room than its table.
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "emoji: 128x128, 1 steps", "on 2 ranks of", "ms", "efficiency", "Plan cfg=2, because each half of guidance",
        "All ranks together send 32.8 kB for cfg", tables.SHARED_CORES, "wrote",
    ):  # fmt: skip
        assert words in shown
    assert "GB/s" not in shown
    # An older record is kept.
    assert bench(*EMOJI, "--out", tmp_path, "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["format"], values["plan"]) == ("rocm-sd-bench-gpus/1", "cfg=2")
    assert len(list(tmp_path.iterdir())) == 2


def test_pictures_that_are_shared_out_are_counted_by_the_second(measured):
    record = GpusRecord.load(measured[0] / "data.json")
    assert (record.plan, record.why, record.pictures, record.sent) == ("data=2", "it was asked for", 2, {})
    rates = {row["drawn by"]: float(row["pictures/s"]) for row in tables.speeds(record)}
    slowest = max(record.way(TOGETHER).ms)
    assert rates[TOGETHER] >= 0.99 * 2e3 / slowest
    assert "All ranks together send nothing a picture." in tables.notes(record)


def test_a_red_gate_has_no_speed(measured, no_run, tmp_path, capsys):
    record = GpusRecord.load(measured[0] / "wrong.json")
    assert record.way(TOGETHER).ms == ()
    assert record.way(TOGETHER).left_out.startswith("wrong result: latents of rank 1: largest error")
    assert len(record.way(OURS).ms) == 1
    no_run.append(record)
    assert bench(*EMOJI, "--out", tmp_path) == 7
    printed = capsys.readouterr()
    assert "not timed" in printed.out
    assert "efficiency" in printed.out
    assert [(row["drawn by"], row["against"], row["efficiency"]) for row in tables.gains(record)] == [(OURS, STOCK, "")]
    assert "All ranks together send" not in printed.out
    assert "1 result(s) were wrong, and were not timed: rocm-sd, all ranks: wrong result" in printed.err


def test_a_record_with_times_of_a_wrong_result_is_refused(measured, tmp_path):
    record = GpusRecord.load(measured[0] / "wrong.json")
    ways = (*record.ways[:2], replace(record.ways[2], ms=(1.0, 1.0)))
    replace(record, ways=ways).save(tmp_path / "x.json")
    with pytest.raises(UnreadableRecord, match="has times and was left out"):
        GpusRecord.load(tmp_path / "x.json")
    replace(record, ways=(Way(STOCK, 1),)).save(tmp_path / "y.json")
    with pytest.raises(UnreadableRecord, match="nothing says why"):
        GpusRecord.load(tmp_path / "y.json")


def test_what_is_not_finite_is_wrong():
    exact = torch.ones(2, 3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    stock, lost = ((torch.ones(2, 3) * by, torch.ones(3) * by) for by in (1.0, float("nan")))
    ways = several_gpus.judged({STOCK: [stock], OURS: [stock], TOGETHER: [stock, lost]}, exact)
    assert [ways[name].left_out for name in (STOCK, OURS)] == [None, None]
    assert ways[TOGETHER].left_out.startswith("wrong result: latents of rank 1")
    assert ways[TOGETHER].error == 0.0


def test_efficiency_and_the_link_of_cards(measured):
    record = GpusRecord.load(measured[0] / "emoji-2-gpus.json")
    times = {STOCK: 400.0, OURS: 100.0, TOGETHER: 62.5}
    ways = tuple(replace(way, ms=(times[way.name],) * 8) for way in record.ways)
    machine = replace(record.machine, device="a card", arch="gfx942")
    record = replace(record, ways=ways, machine=machine, cards=("a card", "another"), link=48e9)
    assert tables.gains(record)[-1] == {
        "drawn by": TOGETHER, "against": OURS, "times": "1.60", "interval": "1.60 to 1.60", "verdict": "faster",
        "efficiency": "0.80",
    }  # fmt: skip
    assert tables.speeds(record)[-1]["ms a picture"] == "62.5"
    said = " ".join(tables.notes(record))
    assert "48.0 GB/s" in said
    assert "The ranks run on a card, another." in said
    assert tables.SHARED_CORES not in said


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("emoji", "--parallel", "cfg"), 3, "--parallel does not support one GPU"),
        (("emoji", "--gpus", "0"), 2, "It takes 1 or more, e.g. --gpus 2."),
        (("emoji", "--gpus", "4096"), 2, "With --device cpu, this machine takes"),
        (("emoji", "--gpus", "2", "--parallel", "rows"), 2, "plan 'rows' is not known"),
        (("emoji", "--gpus", "2", "--parallel", "cfg=2,patch=2"), 3, "multiplied, are to be 2"),
        (("emoji", "--gpus", "2", "--batch", "8"), 3, "bench --gpus does not support --batch"),
        (("emoji", "--gpus", "2", "--engines", "compile"), 3, "bench --gpus does not support --engines"),
        (("emoji", "--gpus", "2", "--ablation"), 3, "bench --gpus does not support --ablation"),
        (("emoji", "--gpus", "2", "--against", "x.json"), 3, "bench --gpus does not support --against"),
        (("emoji", "--gpus", "2", "--cold"), 3, "bench --gpus does not support --cold"),
        (("emoji", "--gpus", "2", "--csv"), 3, "bench --gpus does not support --csv"),
        (("emoji", "--gpus", "2", "--submit", "x"), 3, "bench --gpus does not support --submit"),
        (("--pareto", "--gpus", "2"), 3, "bench --pareto does not support --gpus"),
        (("serve", "--gpus", "2"), 3, "bench serve does not support --gpus"),
        (("op:conv2d", "--gpus", "2"), 3, "bench op:conv2d does not support --gpus"),
        (("frog", "--gpus", "2"), 2, "workload 'frog' is not known"),
        (("sd15-512", "--gpus", "2"), 6, "sd15-512 needs a GPU"),
        (("sd15-512", "--gpus", "2", "--model", "/nowhere/at/all"), 4, "There is no model"),
        (("--gpus", "2"), 2, "rocm-sd bench emoji"),
    ],
)
def test_what_is_wrong_is_said_before_a_process_is_started(tmp_path, capsys, no_run, arguments, code, sentence):
    assert bench(*arguments, "--device", "cpu", "--out", tmp_path) == code
    printed = capsys.readouterr().err
    assert sentence in printed
    assert "Traceback" not in printed
    assert not list(tmp_path.iterdir())


def test_gpus_that_are_not_there(tmp_path, capsys, no_run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert bench("emoji", "--gpus", "2", "--out", tmp_path) == 6
    assert "--gpus 2 needs 2 GPUs, and torch sees 0." in capsys.readouterr().err


def test_ctrl_c_ends_it_as_everywhere(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(launching, "launch", interrupted)
    assert bench(*EMOJI, "--out", tmp_path) == 130
    assert not list(tmp_path.iterdir())


def test_help_has_an_example(capsys):
    assert bench("--help") == 0
    shown = capsys.readouterr().out
    assert "rocm-sd bench sdxl-1024 --gpus 2 --parallel cfg" in shown
    assert "--parallel" in shown


def test_ranks_wait_for_a_slow_card_that_draws_in_float64(monkeypatch):
    """With the rest of what a rank does left out: how long it waits for another."""
    waits = []

    def join(_device, *, patience):
        waits.append(patience)
        raise InterruptedError

    monkeypatch.setattr("rocm_sd.parallel.join", join)
    asked = bench_gpus.AskedOfGpus("emoji", 2, "auto", None, 1, 1, False, "cpu", None)
    with pytest.raises(InterruptedError):
        real_measure(torch.device("cpu"), asked, None)
    assert waits[0] >= timedelta(hours=1)
