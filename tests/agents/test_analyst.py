"""What the analyst says of recorded runs, held against arithmetic by hand; and what it says of files it cannot use."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from scripted_endpoint import scripted

from rocm_sd import arch
from rocm_sd.agents.analyst import Analysis, Chance, Unanalysable, analyse, as_table, improvable, to_dict
from rocm_sd.agents.proposers import LanguageModel, Reviewer
from rocm_sd.agents.roster import Agent
from rocm_sd.bench import ops
from rocm_sd.bench.profiling import Analysis as Profile
from rocm_sd.bench.profiling import TimePart
from rocm_sd.bench.records import Machine, Measurement, Record, WorkloadFacts
from rocm_sd.cli import main
from rocm_sd.errors import InvalidOption, RocmSdError
from rocm_sd.ops import OPS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PRINTED = BENCHMARKS / "engine-h200" / "profile-sdxl-b1.txt"
MACHINE = Machine("NVIDIA H200", "sm_90", 132, 143155, "580", "Linux 6.18", {"torch": "2.11.0"})
FACTS = WorkloadFacts("sd15-512", "sd15", "random", 512, 512, 50, "DDIMScheduler", 7.5, "float16")


def printed(table) -> str:
    written_to = io.StringIO()
    Console(width=80, file=written_to).print(table)
    return written_to.getvalue()


def edited(tmp_path, *changes: tuple[str, str], name: str = "profile.txt") -> Path:
    text = PRINTED.read_text()
    for before, after in changes:
        assert text.count(before) == 1
        text = text.replace(before, after)
    (tmp_path / name).write_text(text)
    return tmp_path / name


def stored(tmp_path, *families: TimePart, **more) -> Path:
    """A profile as rocm-sd profile --json prints it, of a card that waits for 1 of 10 ms."""
    given = {"device": "AMD Instinct MI300X", "arch": "gfx942", "wall_ms": 10.0, "profiled_ms": 14.0, "busy_ms": 9.0}
    given |= {"modules": (), "kernels": (), "on_gpu": True, **more}
    profile = Profile(families=(*families, TimePart("idle", 1.0, 0.1, 0)), **given)
    (tmp_path / "profile.json").write_text(json.dumps(profile.to_dict()))
    return tmp_path / "profile.json"


def test_an_analyst_is_told_the_table_and_its_comment_is_printed(tmp_path, capsys):
    pytest.importorskip("openai")
    roster, record = (
        tmp_path / "roster.yaml",
        stored(tmp_path, TimePart("attention", 6.0, 0.6, 60, None, 3.0, 6.0, "compute")),
    )
    with scripted(["Fuse \x1b[31mit."] * 2) as server:
        entries = {
            name: {"endpoint": server.url, "model": "m", "role": name}
            for name in ("meaningful_work", "analyst", "implementation")
        }
        roster.write_text(json.dumps({"agents": entries}))
        for name in ("meaningful_work", "analyst"):
            main.app(
                ["improve", "--analyse", str(record), "--agent", name, "--agents", str(roster)], standalone_mode=False
            )
            shown = capsys.readouterr().out
            assert f"{name} says, and nobody has checked it:" in shown
            assert "Fuse \\x1b[31mit." in shown
        told = server.asked[0]["messages"][-1]["content"]
        assert '"gain_ms": 3.0' in told
        assert str(tmp_path) not in told
        with pytest.raises(InvalidOption, match="Its role implementation comments on no record"):
            main.app(
                ["improve", "--analyse", str(record), "--agent", "implementation", "--agents", str(roster)],
                standalone_mode=False,
            )
        assert len(server.asked) == 2


@pytest.mark.parametrize("role", ["analyst", "meaningful_work"])
def test_an_analyst_neither_writes_kernels_nor_reviews(role):
    agent = Agent("a", "http://127.0.0.1:1/v1", "m", role)
    with pytest.raises(InvalidOption, match=f"Its role {role} writes no kernels. An analyst takes --analyse"):
        LanguageModel(OPS["geglu"], ("gfx1100",), agent)
    with pytest.raises(InvalidOption, match=f"Its role {role} reviews nothing"):
        Reviewer(agent)


def op_record(us: float, call: str = "512x5120, float16", **more) -> dict:
    """A record of one call of geglu, as benchmarks/ops.py writes it."""
    row = {
        "call": call,
        "problem": {"dtype": "float16"},
        "implementation": "triton",
        "us": {"stock": 90.0, "triton": us},
    }
    machine = {"gpu": "NVIDIA H200", "arch": "sm_90", "compute_units": 132}
    return {"op": "geglu", "machine": machine, "command": "python benchmarks/ops.py", "rows": [row], **more}


def written(tmp_path, values: object, name: str = "record.json") -> Path:
    (tmp_path / name).write_text(values if isinstance(values, str) else json.dumps(values))
    return tmp_path / name


def saved(tmp_path, record: Record) -> Path:
    record.save(tmp_path / "record.json")
    return tmp_path / "record.json"


def engines(*measurements: Measurement, **more) -> Record:
    return Record("engines", FACTS, MACHINE, "rocm-sd bench", "2026-11-15", measurements, **more)


# Recorded runs


def test_the_recorded_profile_of_sdxl_by_hand():
    found = analyse(PRINTED)
    # The printed percent of the printed time is the floor: of GEMM (1 - 63%) x 56 = 20.72 are above it, of convolution
    # (1 - 68%) x 34 = 10.88, of attention (1 - 40%) x 18 = 10.80. Waiting needs no time. The rest has no percent.
    by_hand = [
        ("idle", 35, 35), ("GEMM", 56, 20.72), ("convolution", 34, 10.88), ("attention", 18, 10.80),
        ("norm", 12, 0), ("elementwise", 4.6, 0), ("layout copies", 1.1, 0),
    ]  # fmt: skip
    assert [(c.op, c.ms) for c in found.chances] == [(op, ms) for op, ms, _ in by_hand]
    assert [c.gain_ms for c in found.chances] == pytest.approx([gain for _, _, gain in by_hand], abs=1e-9)
    assert (found.kind, found.device, found.total_ms) == ("profile", "NVIDIA H200 (sm_90)", 163.5)
    bounds = ["launches", *["matrix unit"] * 3, "launches", *["unknown"] * 2]
    assert [c.bound for c in found.chances] == bounds
    assert any("no gain, of: norm, elementwise, layout copies" in note for note in found.notes)
    assert any("cut" in note for note in found.notes)


def test_calls_and_the_share_of_our_kernels_are_those_of_the_listed_lines():
    attention, norm = (c for c in analyse(PRINTED).chances if c.op in {"attention", "norm"})
    # 280 + 280 + 16 calls; ours are _attend 2.30 and _softmax_rows 0.42 of 15.60 + 2.30 + 0.42 = 18.32: 15%.
    assert (attention.calls, attention.runs) == (576, "15% in our kernels")
    # 12 ms in 840 + 226 + 226 + 210 + 48 = 1550 calls are 7.7 us each.
    assert norm.change.startswith("calls of 7.7 us, of which a launch is about 3")


def test_what_an_agent_may_improve_is_an_op_and_no_family():
    chance = improvable(analyse(PRINTED))
    assert chance is not None
    assert (chance.op, chance.gain_ms) == ("attention", pytest.approx(10.8))
    assert improvable(analyse(BENCHMARKS / "engine-h200" / "sdxl-mlperf.json")) is None


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "engine-h200").glob("profile-*.txt")), ids=lambda path: path.stem)
def test_every_recorded_profile_is_ranked(path):
    gains = [c.gain_ms for c in analyse(path).chances]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 0


def test_the_calls_of_an_op_by_hand():
    found = {c.shape: c for c in analyse(BENCHMARKS / "ops-h200" / "attention.json").chances}
    chance = found["2x4096x8x40 to 4096 keys, float16"]
    # Two products of 2 x 2 x 8 x 4096 x 4096 x 40 operations at 989.4 TFLOP/s are 43.4 us of the recorded 155.9.
    assert chance.floor_ms == pytest.approx(2 * 2 * 2 * 8 * 4096**2 * 40 / 989.4e12 * 1e3)
    assert chance.gain_ms * 1e3 == pytest.approx(155.9 - 43.4, abs=0.05)
    assert (chance.bound, chance.runs, chance.calls) == ("matrix unit", "torch", None)
    assert chance.change == "torch runs: a better config of our kernel (triton, which took 192.9 us)"


def test_products_of_8_bits_are_held_against_their_own_rate():
    found = {c.shape: c for c in analyse(BENCHMARKS / "ops-h200" / "linear_8bit.json").chances}
    chance = found["2048x1280 @ 1280x10240 of int8 + bias, float16"]
    assert chance.floor_ms == pytest.approx(2 * 2048 * 1280 * 10240 / 1978.9e12 * 1e3)


def test_what_was_faster_in_the_same_run_and_what_is_a_mere_copy_is_said():
    conv = analyse(BENCHMARKS / "ops-h200" / "conv2d.json").chances[0]
    assert conv.change == "triton took 4802.8 us in the same run: choose it, rocm-sd tune"
    geglu = analyse(BENCHMARKS / "ops-h200" / "geglu.json").chances[0]
    assert geglu.change.startswith("as fast as a copy of its bytes (120.9 us): only fusing")


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "ops-h200").glob("*.json")), ids=lambda path: path.stem)
def test_no_more_is_promised_than_lies_above_the_floor(path):
    found = analyse(path)
    assert len(found.chances) == len(json.loads(path.read_text())["rows"])
    assert all(c.floor_ms is None or 0 <= c.gain_ms <= max(0, c.ms - c.floor_ms) for c in found.chances)
    assert found.total_ms is None
    assert improvable(found).op == path.stem


def test_the_floor_is_the_one_that_bench_records(monkeypatch):
    monkeypatch.setattr(arch, "detect", lambda _device: arch.get("sm_90"))
    op = OPS["conv2d"]
    for chance in analyse(BENCHMARKS / "ops-h200" / "conv2d.json").chances[:5]:
        samples = (*(bucket.sample for bucket in op.tuning.buckets), *op.tuning.timed)
        sample = next(each for each in samples if each.name == chance.shape)
        floor = ops.floor_ms(op, sample, sample.make(filled=False), torch.device("cpu"))
        assert chance.floor_ms == pytest.approx(floor)


def test_a_record_of_rocm_sd_bench_has_the_whole_picture_and_the_next_command():
    found = analyse(BENCHMARKS / "engine-h200" / "sdxl-mlperf.json")
    (chance,) = found.chances
    # p50 638.0 ms of the 20 recorded turns, and 283.9 ms for its arithmetic.
    assert (chance.op, chance.shape, chance.runs) == ("picture", "sdxl-mlperf, batch 1", "rocm-sd (rocm-sd)")
    assert chance.gain_ms == pytest.approx(638.0 - 283.9, abs=0.1)
    assert "rocm-sd profile sdxl-mlperf --batch 1 --out FOLDER" in chance.change
    assert any("rocm-sd at batch 8" in note for note in found.notes)


def test_of_an_ablation_it_is_the_fastest():
    path = BENCHMARKS / "ablation-h200" / "sd15-512-ablation-batch1.json"
    assert analyse(path).chances[0].runs == "step graph (rocm-sd)"


# What they do not show


def test_the_time_in_which_the_card_waits_is_apart_where_it_was_recorded(tmp_path):
    ours = Measurement("rocm-sd", "1", "rocm-sd", 1, (100.0,), 50, floor_ms=40.0, card_ms=70.0)
    stock = Measurement("stock", "2", "torch", 1, (90.0,), 50, floor_ms=40.0)
    found = analyse(saved(tmp_path, engines(stock, ours, complete=False)))
    assert [(c.op, c.ms, c.gain_ms) for c in found.chances] == [("idle", 30.0, 30.0), ("picture", 70.0, 30.0)][::-1]
    assert found.total_ms == 100.0
    assert any("interrupted" in note for note in found.notes)


def test_a_record_of_ops_by_rocm_sd_bench(tmp_path):
    def timed(engine, batch, ms, provider, **more):
        return Measurement(engine, "1", provider, batch, ms, 1, **more)

    measured = (
        timed("stock", 1, (0.09,), "torch"), timed("rocm-sd", 1, (0.02,), "torch (stock)"),
        timed("stock", 2, (), "torch", left_out="not timed"), timed("rocm-sd", 2, (), "triton", left_out="7 are NaN"),
    )  # fmt: skip
    facts = replace(FACTS, name="op:geglu")
    cases = ("geglu 512x5120, float16", "geglu 2048x2560, float16")
    record = Record("op", facts, MACHINE, "rocm-sd bench", "2026-11-15", measured, op_cases=cases)
    found = analyse(saved(tmp_path, record))
    (chance,) = found.chances
    assert (found.kind, chance.op, chance.shape, chance.ms) == ("ops", "geglu", "512x5120, float16", 0.02)
    # 512 rows of 10240 values read and 5120 written, of 2 bytes each, at 4.8 TB/s: 3.3 us.
    assert chance.floor_ms == pytest.approx(512 * 3 * 5120 * 2 / 4800e9 * 1e3)
    assert (chance.runs, chance.change) == ("torch", "torch runs: a better config of our kernel (triton)")
    assert any("2048x2560" in note and "7 are NaN" in note for note in found.notes)


def test_a_stored_profile_with_every_kind_of_bound(tmp_path):
    kernels = (TimePart("_moments", 2.0, 0.2, 10, families={"norm": 2.0}),)
    families = (
        TimePart("GEMM", 4.0, 0.4, 100, 1e9, 3.8, 4.0, "compute"),
        TimePart("norm", 3.0, 0.3, 100, 1e6, 1.2, 2.0, "memory"),
        TimePart("elementwise", 2.0, 0.2, 100, None, None, None),
    )
    found = analyse(stored(tmp_path, *families, kernels=kernels, subject={"workload": "sd15-512"}, graph_share=0.0))
    # Of norms 2 of 3 ms are counted: no more than 2 - 1.2 can be claimed.
    assert [(c.op, c.ms, pytest.approx(c.gain_ms)) for c in found.chances] == [
        ("idle", 1.0, 1.0), ("norm", 2.0, 0.8), ("GEMM", 4.0, 0.2), ("elementwise", 2.0, 0.0),
    ]  # fmt: skip
    idle, norm, gemm, elementwise = found.chances
    assert "capture the steps as a graph" in idle.change
    assert (norm.bound, norm.runs) == ("memory", "100% in our kernels")
    assert norm.change.startswith("60% of the bandwidth: fewer passes, wider loads")
    assert gemm.change == "within 10% of its floor: leave it"
    assert elementwise.floor_ms is None
    assert {"sd15-512", "of norm only the time is here whose work was counted"} <= set(found.notes)


def test_under_the_profiler_nobody_knows_how_long_the_card_waits(tmp_path):
    found = analyse(stored(tmp_path, TimePart("GEMM", 9.0, 0.9, 1, 1e9, 3.0, 9.0, "compute"), profiled_ms=10.0))
    assert [c.op for c in found.chances] == ["GEMM"]
    assert found.total_ms == 9.0
    assert any("slowed by the profiler" in note for note in found.notes)


def test_a_trace_names_its_card_and_has_the_floor_of_its_shapes(tmp_path):
    def event(cat, name, start, end, **args):
        return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": end - start, "args": args}

    shapes = {"Input Dims": [[4096, 4096], [4096, 4096]], "Input type": ["c10::Half", "c10::Half"]}
    events = [
        event("cpu_op", "aten::mm", 0, 50, **shapes),
        event("cuda_runtime", "hipLaunchKernel", 10, 20, correlation=1),
        event("kernel", "Cijk_Ailk_Bljk_HHS_BH_MT64", 30, 1030, correlation=1, device=0, stream=7),
    ]
    trace = {"deviceProperties": [{"name": "AMD Instinct MI300X"}], "traceEvents": events}
    (chance,) = analyse(written(tmp_path, trace, "trace.json")).chances
    floor = 2 * 4096**3 / arch.get("gfx942").peak("float16") / 1e12 * 1e3
    assert (chance.op, chance.ms, chance.gain_ms) == ("GEMM", 1.0, pytest.approx(1.0 - floor))
    for damaged in ({**trace, "traceEvents": 1}, {**trace, "traceEvents": [{"ph": "X", "dur": "1"}]}):
        with pytest.raises(Unanalysable, match="damaged trace"):
            analyse(written(tmp_path, damaged))
    with pytest.raises(Unanalysable, match="no peak rate and bandwidth of 'no card'"):
        analyse(written(tmp_path, {"traceEvents": events}))


def test_what_is_faster_than_its_floor_has_nothing_to_win_and_is_noted(tmp_path):
    found = analyse(written(tmp_path, op_record(us=1.0)))
    (chance,) = found.chances
    assert chance.floor_ms > chance.ms
    assert (chance.gain_ms, chance.change) == (0.0, "faster than its floor: leave it")
    assert any(note.startswith("faster than the floor") and "512x5120" in note for note in found.notes)
    assert improvable(found) is None


def test_a_shape_that_the_op_does_not_know_has_no_floor(tmp_path):
    (chance,) = analyse(written(tmp_path, op_record(20.0, "7x7, float16"))).chances
    assert (chance.floor_ms, chance.gain_ms, chance.bound) == (None, 0.0, "unknown")
    assert "?" in printed(as_table(analyse(tmp_path / "record.json")))


def test_short_calls_are_bound_by_their_launches(tmp_path):
    (chance,) = analyse(written(tmp_path, op_record(us=9.0))).chances
    assert (chance.bound, chance.change) == (
        "launches", "calls of 9.0 us, of which a launch is about 3: fuse with a neighbour",
    )  # fmt: skip


def test_ties_go_to_the_longer_time_and_then_by_name(tmp_path):
    parts = [("norm", 2.0, 1.0), ("attention", 2.0, 1.0), ("GEMM", 4.0, 3.0), ("convolution", 0.5, None)]
    families = (TimePart(name, ms, 0.1, 1, None, floor, ms, "compute") for name, ms, floor in parts)
    found = analyse(stored(tmp_path, *families))
    assert [(c.op, c.gain_ms) for c in found.chances] == [
        ("GEMM", 1.0), ("attention", 1.0), ("norm", 1.0), ("idle", 1.0), ("convolution", 0.0),
    ]  # fmt: skip


# What is printed


@pytest.mark.parametrize("name", ["engine-h200/profile-sdxl-b1.txt", "ops-h200/linear_8bit.json"])
def test_the_table_fits_in_80_columns_and_cuts_no_figure(name):
    found = analyse(BENCHMARKS / name)
    text = printed(as_table(found))
    assert max(map(len, text.splitlines())) <= 80
    factor = 1e3 if found.kind == "ops" else 1.0
    for chance in found.chances[:12]:
        assert f" {chance.ms * factor:.1f} " in text
        assert chance.floor_ms is None or f" {chance.gain_ms * factor:.1f} " in text
    assert "measured" in text
    assert "modelled" in text
    assert ("the first 12 of 27" in text) == (found.kind == "ops")


def test_markup_in_a_file_is_text():
    chance = Chance("[red]op", "", None, 1.0, None, "unknown", "[/]", "[bold]")
    assert "[red]op, [/]" in printed(as_table(Analysis("a", "ops", "[b]card", (chance,), None, ())))


def test_as_plain_values_with_a_label_for_every_kind_of_figure():
    found = analyse(PRINTED)
    values = json.loads(json.dumps(to_dict(found)))
    assert values["labels"] == {"ms": "measured", "calls": "counted", "floor_ms": "modelled"}
    assert values["chances"][1] == {**asdict(found.chances[1]), "gain_ms": pytest.approx(20.72)}
    assert (values["format"], values["total_ms"]) == ("rocm-sd-analysis/1", 163.5)


# What cannot be analysed


def refused(path: Path) -> str:
    with pytest.raises(RocmSdError) as error:
        analyse(path)
    assert error.value.hint
    assert "rocm-sd " in error.value.hint
    return error.value.message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("# Of the floor, by FLOPs", "# Of the roof, by FLOPs"), "whole header"),
        (("one NVIDIA H200", "one NVIDIA H999"), "no peak rate and bandwidth of 'NVIDIA H999'"),
        (("one NVIDIA H200", "one NVIDIA"), "no peak rate and bandwidth of 'NVIDIA'"),
        (("idle for 35;", "idle for 45;"), "busy for 127.8 ms and idle for 45.0 ms are not 163.5 ms"),
        (("idle for 35;", "idle for 25;"), "are not 163.5 ms"),
        (("GEMM 56,", "GEMM 16,"), "kernels of GEMM take longer than all 16.0 ms"),
        (("GEMM 56,", "magic 56,"), "not families with a figure each"),
        (("attention 40%", "attention 40"), "not families with a figure each"),
        (("   20.19   320 GEMM ", "   20.19   320 magic"), "line 8 is not milliseconds, calls, family and kernel"),
        (("   20.19   320", "   20.19   -32"), "line 8 is not"),
    ],
)
def test_a_damaged_printed_profile_is_refused(tmp_path, change, said):
    assert said in refused(edited(tmp_path, change))


def test_truncated_files_are_refused(tmp_path):
    lines = PRINTED.read_text().splitlines()
    assert "it has 22 of its 30 kernels" in refused(written(tmp_path, "\n".join(lines[:29]), "a.txt"))
    assert "line 29 is not" in refused(written(tmp_path, "\n".join([*lines[:28], lines[28][:13]]), "b.txt"))
    assert "whole header" in refused(written(tmp_path, "\n".join(lines[:5]), "c.txt"))
    for name in ("ops-h200/geglu.json", "engine-h200/sdxl-mlperf.json"):
        text = (BENCHMARKS / name).read_text()
        assert "it is no JSON" in refused(written(tmp_path, text[: len(text) // 2]))
    whole = stored(tmp_path, TimePart("GEMM", 9.0, 0.9, 1)).read_text()
    assert "it is no JSON" in refused(written(tmp_path, whole[:-20]))


def test_files_of_another_kind_are_refused(tmp_path):
    assert "it is not an object" in refused(BENCHMARKS / "emoji-sd" / "metrics.json")
    assert "its format is neither" in refused(BENCHMARKS / "tuned-h200" / "batch8-export.json")
    assert "of another kind" in refused(BENCHMARKS / "serving-cpu" / "overload.json")
    assert "whole header" in refused(BENCHMARKS / "engine-h200" / "sd15-512-without-graphs.txt")
    assert "it is no JSON" in refused(written(tmp_path, "ms, calls\n", "kernels.csv"))
    assert "there is no such file" in refused(tmp_path / "none.json")
    for absent in ("none.txt", "none.gz"):
        assert "o such file" in refused(tmp_path / absent)
    (tmp_path / "bytes.txt").write_bytes(b"# \xff")
    assert "utf-8" in refused(tmp_path / "bytes.txt")
    assert "directory" in refused(tmp_path)


def test_a_damaged_stored_profile_is_refused(tmp_path):
    values = json.loads(stored(tmp_path, TimePart("GEMM", 9.0, 0.9, 1)).read_text())
    assert "the file has no arch" in refused(written(tmp_path, {k: v for k, v in values.items() if k != "arch"}))
    part = values["families"][0]
    for name, value in (("ms", -1), ("ms", "9"), ("floor_ms", 1e300), ("calls", True), ("families", {"GEMM": None})):
        damaged = {**values, "families": [{**part, name: value}]}
        assert f"families[0].{name}" in refused(written(tmp_path, damaged))


def test_records_of_unknown_cards_and_without_times_are_refused(tmp_path):
    unknown = op_record(20.0, machine={"gpu": "Some card", "arch": "gfx9999", "compute_units": 1})
    assert "no peak rate and bandwidth of 'gfx9999' are known" in refused(written(tmp_path, unknown))
    assert "of 'cpu' are known" in refused(BENCHMARKS / "onnx-cpu" / "bench-emoji.json")
    gone = stored(tmp_path, TimePart("GEMM", 9.0, 0.9, 1), arch="gfx")
    assert "of 'gfx' are known" in refused(gone)
    assert "it holds no times" in refused(written(tmp_path, op_record(20.0, rows=[])))
    assert "it holds no times" in refused(stored(tmp_path))
    left = Measurement("rocm-sd", "1", "rocm-sd", 1, (), 50, left_out="wrong")
    assert "it holds no times" in refused(saved(tmp_path, engines(left)))
