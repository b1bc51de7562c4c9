from __future__ import annotations

import multiprocessing
import time
from dataclasses import replace

import pytest
import torch

from rocm_sd.bench import ops
from rocm_sd.bench.gate import WRONG
from rocm_sd.bench.records import Record, RecordInUse, record_file
from rocm_sd.errors import InvalidOption
from rocm_sd.ops import OPS

CPU = torch.device("cpu")
NAME = "geglu"


@pytest.fixture
def few(monkeypatch):
    """The op with two calls, so that a test takes moments."""
    op = OPS[NAME]
    less = replace(op, verification=replace(op.verification, small=op.verification.small[:2]))
    monkeypatch.setitem(OPS, NAME, less)
    return less


def test_an_op_is_timed_beside_stock_on_every_call(few, tmp_path):
    seen = []
    record = ops.run(f"op:{NAME}", CPU, out=tmp_path, repeats=6, progress=lambda *step: seen.append(step))
    assert (record.kind, record.complete, record.workload.name) == ("op", True, f"op:{NAME}")
    assert record.op_cases == tuple(f"{NAME} {sample.name}" for sample in few.verification.small)
    assert [(m.engine, m.batch) for m in record.measurements] == [
        ("stock", 1), ("rocm-sd", 1), ("stock", 2), ("rocm-sd", 2),
    ]  # fmt: skip
    assert all(len(m.ms) == 6 and min(m.ms) > 0 for m in record.measurements)
    assert record.measurements[1].provider.startswith("torch (")
    assert [(c.engine, c.against, c.batch) for c in record.comparisons] == [
        ("rocm-sd", "stock", 1), ("rocm-sd", "stock", 2),
    ]  # fmt: skip
    assert seen[-1][:2] == (2, 2)
    assert Record.load(record_file(tmp_path, f"op:{NAME}")) == record


def _bench(folder, begun, done):
    op = OPS[NAME]
    OPS[NAME] = replace(op, verification=replace(op.verification, small=op.verification.small[:2]))

    def tried() -> bool:
        try:
            ops.run(f"op:{NAME}", CPU, out=folder, repeats=2, resume=False, progress=lambda *_: begun.wait(60))
        except RecordInUse:
            done.put("refused")
            begun.set()
            return False
        done.put("recorded")
        return True

    while not tried():
        time.sleep(0.2)


def test_two_runs_into_one_folder_at_once_lose_nothing(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    begun, done = spawn.Event(), spawn.Queue()
    # Each waits within its first call until the other was told that the record is taken.
    runs = [spawn.Process(target=_bench, args=(tmp_path, begun, done)) for _ in range(2)]
    for run in runs:
        run.start()
    said = []
    while said.count("recorded") < 2:
        said.append(done.get(timeout=120))
    for run in runs:
        run.join()
    assert said[0] == "refused"
    files = sorted(tmp_path.glob("*.json"))
    assert len(files) == 2
    assert all(Record.load(file).complete and len(Record.load(file).measurements) == 4 for file in files)
    assert not list(tmp_path.glob(".*.lock"))


def test_a_run_that_was_killed_leaves_no_lock_behind(few, tmp_path):
    (tmp_path / f".op-{NAME}.json.lock").touch()
    assert ops.run(f"op:{NAME}", CPU, out=tmp_path, repeats=2).complete


def test_a_wrong_op_is_not_timed(few, tmp_path, monkeypatch):
    stock = few.implementations[0]

    def wrong(*arguments):
        return stock(*arguments) * 1.1

    # Asked for by name, since on a CPU dispatch has nothing but stock to choose.
    op = replace(few, implementations=(stock, replace(stock, name="wrong", run=wrong)))
    monkeypatch.setitem(OPS, NAME, op)
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", f"{NAME}=wrong")
    record = ops.run(f"op:{NAME}", CPU, out=tmp_path, repeats=2)
    assert all(m.ms == () for m in record.measurements)
    assert record.measurements[1].left_out.startswith(WRONG)
    assert record.comparisons == ()


def test_a_call_that_crashes_leaves_the_others(few, tmp_path, monkeypatch):
    stock = few.implementations[0]
    first = few.verification.small[0].make()[0].shape

    def crashing(x, *arguments):
        if x.shape == first:
            raise RuntimeError("out of shared memory\nsecond line")
        return stock(x, *arguments)

    op = replace(few, implementations=(stock, replace(stock, name="other", run=crashing)))
    monkeypatch.setitem(OPS, NAME, op)
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", f"{NAME}=other")
    record = ops.run(f"op:{NAME}", CPU, out=tmp_path, repeats=2)
    assert record.measurements[1].left_out == "RuntimeError: out of shared memory"
    assert len(record.measurements[3].ms) == 2


def test_an_interrupted_run_keeps_the_calls_it_has(few, tmp_path, monkeypatch):
    def interrupted(done, _total, _what):
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ops.run(f"op:{NAME}", CPU, out=tmp_path, repeats=2, progress=interrupted)
    half = Record.load(record_file(tmp_path, f"op:{NAME}"))
    assert (half.complete, half.batches) == (False, (1,))
    whole = ops.run(f"op:{NAME}", CPU, out=tmp_path, repeats=2)
    assert whole.complete
    assert whole.measurements[:2] == half.measurements
    assert whole.batches == (1, 2)


def test_stock_group_norm_is_what_models_run():
    op = OPS["group_norm_silu"]
    sample = op.verification.small[0]
    arguments = sample.make()
    expected = op.implementations[0](*arguments)
    torch.testing.assert_close(ops._stock(op, arguments)(), expected)


def test_names():
    assert ops.is_op("ops")
    assert ops.is_op("op:conv2d")
    assert not ops.is_op("sd15-512")
    assert {op.name for op in ops.selected("ops")} == set(OPS)
    with pytest.raises(InvalidOption) as refused:
        ops.selected("op:none")
    assert "conv2d" in str(refused.value)
