"""The matrix products of both models by shape: found by the models' own code, checked, timed and shown."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from rocm_sd.bench import gemm
from rocm_sd.bench.gate import WRONG
from rocm_sd.bench.records import OURS, STOCK, Record, record_file
from rocm_sd.bench.report import reading
from rocm_sd.cli import main
from rocm_sd.ops import OPS
from rocm_sd.parallel.layers import UNETS

CPU = torch.device("cpu")
FEW = (
    gemm.Product("sd15", 64, 32, 48, bias=False, calls=5),
    gemm.Product("sd15", 64, 48, 32, bias=True, calls=1),
    gemm.Product("sdxl", 64, 32, 48, bias=False, calls=70),
)


def rocm_sd(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main.run(["bench", "gemm", *arguments])
    return int(ended.value.code or 0)


@pytest.mark.parametrize("family", gemm.FAMILIES)
def test_products_are_those_that_the_model_computes(family):
    found = {(p.m, p.n, p.k, p.bias): p.calls for p in gemm.products(family)}
    side = gemm.FAMILIES[family]
    # The innermost level that has attention: its queries, keys, values are C by C, the feed-forward is 8 and 4 times.
    C = UNETS[family]["block_out_channels"][2]
    M = 2 * (side // 4) ** 2
    layers = {"sd15": 5, "sdxl": 60}[family]
    assert found[M, 8 * C, C, True] == layers
    assert found[M, C, 4 * C, True] == layers
    # Three of the self-attention and one of the other.
    assert found[M, C, C, False] == 4 * layers
    # Keys and values of 77 tokens for each of two pictures.
    assert found[2 * 77, C, UNETS[family]["cross_attention_dim"], False] >= 2 * layers


def test_every_candidate_is_timed_and_compared_with_stock(tmp_path):
    record = gemm.run(CPU, out=tmp_path, repeats=2, every=FEW, command="rocm-sd bench gemm")
    # A shape of both models is timed once.
    assert len(record.op_cases) == 2
    assert [m.engine for m in record.measurements if m.batch == 1] == [STOCK, OURS, "addmm"]
    assert all(len(m.ms) == 2 for m in record.measurements)
    assert all(m.error is not None and m.error < 1e-5 for m in record.measurements)
    assert {c.engine for c in record.comparisons} == {OURS, "addmm"}
    assert Record.load(record_file(tmp_path, "gemm")) == record
    again = gemm.run(CPU, out=tmp_path, repeats=2, every=FEW)
    assert again.when >= record.when, "a finished record is not resumed"


def test_rates_and_shares_of_peak_stand_side_by_side(tmp_path):
    record = gemm.run(CPU, out=tmp_path, repeats=2, every=FEW)
    headings, rows = gemm.table(record)
    assert headings == ("model", "product", "calls a step", "of the work", STOCK, OURS, "addmm")
    assert [row[:4] for row in rows] == [
        ("sd15", "64x48 @ 48x32", "5", "83%"),
        ("sd15", "64x32 @ 32x48 + bias", "1", "17%"),
        ("sdxl", "64x48 @ 48x32", "70", "100%"),
    ]
    assert all(sum(cell.endswith("*") for cell in row[4:]) >= 1 for row in rows)
    assert "%" not in "".join(rows[0][4:]), "the peak of a CPU is not known"
    # 2 * 64 * 32 * 48 FLOP in 0.001 ms are 0.1966 TFLOP/s, of 989.4 on an H200 in float16.
    fixed = tuple(replace(m, ms=(1e-3,)) for m in record.measurements)
    on_card = replace(record, measurements=fixed, machine=replace(record.machine, arch="sm_90"))
    on_card = replace(on_card, workload=replace(record.workload, dtype="float16"))
    on_card = replace(on_card, op_cases=tuple(case.replace("float32", "float16") for case in record.op_cases))
    assert gemm.table(on_card)[1][0][4] == "0.197 (0%)*"
    faster = tuple(replace(m, ms=(1e-6,)) for m in record.measurements)
    assert gemm.table(replace(on_card, measurements=faster))[1][0][4] == "197 (20%)*"


def test_a_cpu_has_fewer_rows_and_shares_are_of_the_whole_product(tmp_path, monkeypatch):
    monkeypatch.setattr(gemm, "_ROWS_ON_A_CPU", 16)
    record = gemm.run(CPU, out=tmp_path, repeats=2, every=(FEW[0], replace(FEW[1], m=32)))
    assert all(" 16x" in case for case in record.op_cases)
    assert [row[1:4] for row in gemm.table(record)[1]] == [
        ("64x48 @ 48x32", "5", "91%"),
        ("32x32 @ 32x48 + bias", "1", "9%"),
    ]
    ms = record.measurement(STOCK, 1).p50_ms
    rate = 2 * 16 * 32 * 48 / ms / 1e9
    assert gemm.table(record)[1][0][4].rstrip("*") == f"{rate:.3g}"
    assert "at most 16 rows" in str(record.notes)


def test_a_wrong_candidate_is_not_timed(tmp_path, monkeypatch):
    op = OPS["linear_residual"]
    broken = replace(op.implementations[1], run=lambda x, w, *_: x @ w.T + 1)
    monkeypatch.setitem(OPS, "linear_residual", replace(op, implementations=(op.implementations[0], broken)))
    record = gemm.run(CPU, out=tmp_path, repeats=2, every=FEW[:1])
    wrong = record.measurement("addmm", 1)
    assert wrong.left_out.startswith(WRONG)
    assert not wrong.ms
    assert gemm.table(record)[1][0][-1] == ""
    assert record.measurement(STOCK, 1).ms


def test_a_candidate_that_raises_leaves_the_others(tmp_path, monkeypatch):
    op = OPS["linear_residual"]

    def fails(*_arguments):
        raise RuntimeError("no such kernel")

    broken = replace(op.implementations[1], run=fails)
    monkeypatch.setitem(OPS, "linear_residual", replace(op, implementations=(op.implementations[0], broken)))
    record = gemm.run(CPU, out=tmp_path, repeats=2, every=FEW[:1])
    assert "no such kernel" in record.measurement("addmm", 1).left_out
    assert record.measurement(OURS, 1).ms


def test_an_interrupted_run_goes_on(tmp_path):
    def stop(done, _total, _what):
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gemm.run(CPU, out=tmp_path, repeats=2, every=FEW, progress=stop)
    begun = Record.load(record_file(tmp_path, "gemm"))
    assert not begun.complete
    assert begun.batches == (1,)
    ended = gemm.run(CPU, out=tmp_path, repeats=2, every=FEW)
    assert ended.complete
    assert ended.measurements[: len(begun.measurements)] == begun.measurements


def test_the_report_reads_it_and_what_a_file_says_is_not_believed(tmp_path):
    record = gemm.run(CPU, out=tmp_path, repeats=2, every=FEW)
    (run,) = reading.read([record_file(tmp_path, "gemm")]).op_runs
    assert {timing.op for timing in run.timings} == {"linear_residual"}
    hostile = [{"model": "sd15", "m": -1, "n": 1, "k": 1, "bias": True, "calls": 1}, 7, None, {"m": "x"}]
    assert gemm.table(replace(record, extra={"products": hostile}))[1] == []
    assert gemm.table(replace(record, extra={"products": "none"}))[1] == []


def test_the_command_prints_the_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gemm, "products", lambda family: [p for p in FEW if p.model == family])
    monkeypatch.setenv("COLUMNS", "120")
    assert rocm_sd("--device", "cpu", "--repeats", "2", "--out", str(tmp_path)) == 0
    printed = capsys.readouterr().out
    for words in ("64x48 @ 48x32", "addmm", "* is the fastest", "at most 512 rows", "gemm.json"):
        assert words in printed
    assert json.loads((tmp_path / "gemm.json").read_text())["command"].startswith("rocm-sd bench gemm")
    assert rocm_sd("--model", "x/y", "--out", str(tmp_path)) != 0
