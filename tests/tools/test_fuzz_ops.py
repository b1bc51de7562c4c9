"""The fuzz finds kernels that are wrong, each in one way, and passes those that are not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import fuzz_ops
import fuzz_rounds
from fuzz_calls import CALLS
from fuzz_rounds import KINDS, ROTATION, run_round
from rocm_sd.errors import InvalidOption, NumericsFailure
from rocm_sd.ops import OPS
from rocm_sd.workers import Worker

kernels = pytest.importorskip("rocm_sd.kernels.triton.geglu")


@pytest.fixture
def few(tmp_path):
    """few(op, count): so many draws of one op, tried in this process."""

    def run(op: str, count: int = 3) -> fuzz_rounds.Round:
        return run_round(0, 0, count, "cpu", True, (op,), str(tmp_path / "begun"))

    return run


def test_every_op_has_its_draws():
    assert set(CALLS) == set(ROTATION) == set(OPS)


@pytest.mark.parametrize("op", [name for name in OPS if name != "transformer_block"])
def test_the_kernels_of_this_project_pass(op, few):
    found = few(op)
    assert found.reasons == []
    assert sum(found.calls.values()) >= 3 or found.skipped
    assert all(name == op for name, *_ in found.calls)


def test_the_same_number_is_the_same_call_and_kinds_come_back_with_other_sizes():
    first, again = (fuzz_rounds._case(5, 7, fuzz_rounds.Limits(), ()) for _ in range(2))
    assert first.drawn.sample.name == again.drawn.sample.name
    cases = [fuzz_rounds._case(5, number, fuzz_rounds.Limits(), ("conv2d",)) for number in range(3 * KINDS)]
    assert {case.kind for case in cases} == set(range(KINDS))
    for one, other in zip(cases, cases[KINDS:], strict=False):
        assert one.drawn.said == other.drawn.said
    assert len({case.drawn.sample.name for case in cases}) > 2 * KINDS


def test_sizes_are_those_of_pictures_and_every_tail_comes():
    residues = set()
    for number in range(6000):
        case = fuzz_rounds._case(0, number, fuzz_rounds.Limits(), ("linear_residual",))
        x, *_ = case.arguments(torch.device("cpu"), filled=False)
        residues.add(x.numel() // x.shape[-1] % 128)
        assert x.numel() <= 2 * fuzz_rounds.Limits().elements * 2
    assert residues == set(range(128))


def _wrong_in_one(y):
    y.view(-1)[-1] += 0.5


def _unwritten(y):
    y.view(-1)[0] = float("nan")


def _beside(y):
    y.as_strided((1,), (1,), y.storage_offset() + y.numel()).fill_(1.0)


def _other_bits(y):
    _other_bits.calls += 1
    y.view(-1)[0] *= 1.0 + 2.0**-10 * (_other_bits.calls % 2)


def _raises(_y):
    raise RuntimeError("an illegal memory access was encountered")


_other_bits.calls = 0
PLANTED = {
    _wrong_in_one: "largest error",
    _unwritten: "largest error nan",
    _beside: "memory was written beside a result",
    _other_bits: "other bits the second time",
    _raises: "an illegal memory access",
}


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(fault, few, monkeypatch):
    right = kernels.launch

    def wrong(x, y, *rest):
        right(x, y, *rest)
        # Results in 8 bits cannot hold all of the faults.
        if y.element_size() > 1:
            fault(y)

    monkeypatch.setattr(kernels, "launch", wrong)
    found = few("geglu", 6)
    assert any(PLANTED[fault] in reason for reason in found.reasons)
    assert all(row[:2] == ("geglu", "triton") for row in found.failures)


def test_a_kernel_that_writes_to_its_arguments_is_found(few, monkeypatch):
    right = kernels.launch

    def wrong(x, y, *rest):
        right(x, y, *rest)
        x[-1, -1] = 0.0

    monkeypatch.setattr(kernels, "launch", wrong)
    assert any("beside or in an argument" in reason for reason in few("geglu").reasons)


def test_a_kernel_that_reads_beside_its_arguments_is_found(few, monkeypatch):
    right = kernels.launch

    def wrong(x, y, *rest):
        right(x, y, *rest)
        y.view(-1)[0] += x.as_strided((1,), (1,), x.storage_offset() - 1)[0] * 0

    monkeypatch.setattr(kernels, "launch", wrong)
    assert any("largest error nan" in reason for reason in few("geglu").reasons)


def test_the_tool_keeps_a_record_and_goes_on_from_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    out = tmp_path / "fuzz.json"
    options = {"seed": 3, "seconds": 600.0, "out": out, "ops": "geglu,guided_step", "device": "cpu", "small": None}
    fuzz_ops.fuzz(calls=4, samples=2, **options)
    first = json.loads(out.read_text())
    assert first["calls"] >= 4
    assert first["failures"] == 0
    assert {row[0] for row in first["table"]} == {"geglu", "guided_step"}
    assert sum(row[4] for row in first["table"]) == first["calls"]
    fuzz_ops.fuzz(calls=first["calls"] + 1, samples=2, **options)
    second = json.loads(out.read_text())
    assert second["next"] == first["next"] + 2
    assert second["calls"] > first["calls"]
    assert "0 failures" in capsys.readouterr().out
    with pytest.raises(InvalidOption, match="--out"):
        fuzz_ops.fuzz(calls=4, samples=2, **{**options, "seed": 4})
    with pytest.raises(InvalidOption, match="no_such_op"):
        fuzz_ops.fuzz(calls=4, samples=2, **{**options, "ops": "no_such_op"})


def dies(*given) -> None:
    Path(given[-1]).write_text("17 triton block=4")
    os._exit(9)


def test_a_call_that_ends_its_process_is_a_failure_and_the_rest_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz_ops, "run_round", dies)
    out = tmp_path / "fuzz.json"
    with pytest.raises(NumericsFailure, match="2 of 2 calls failed"):
        fuzz_ops.fuzz(calls=2, samples=5, seed=0, seconds=60.0, out=out, ops="geglu", device="cpu", small=None)
    record = json.loads(out.read_text())
    assert record["next"] == 10
    assert record["reasons"] == ["17 triton block=4: crashed with exit status 9"] * 2


def test_ctrl_c_keeps_what_was_done(tmp_path, monkeypatch):
    rounds = [fuzz_rounds.Round(calls={("geglu", "triton", "", ""): 3}, samples=3)]

    def call(_self, *_given, **_named):
        if not rounds:
            raise KeyboardInterrupt
        return rounds.pop()

    monkeypatch.setattr(Worker, "call", call)
    out = tmp_path / "fuzz.json"
    fuzz_ops.fuzz(calls=9, samples=3, seed=0, seconds=60.0, out=out, ops="geglu", device="cpu", small=None)
    assert json.loads(out.read_text())["calls"] == 3
