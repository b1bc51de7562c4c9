from __future__ import annotations

from pathlib import Path

import pytest

from rocm_sd import arch
from rocm_sd.kernels.hip import toolchain
from rocm_sd.ops import OPS
from rocm_sd.tuning import choice
from rocm_sd.verify.proofs import EMULATED, RUNGS, proofs, recorded

ROOT = Path(__file__).parents[2]


def test_every_proof_names_what_exists():
    assert proofs()
    for proof in proofs():
        assert proof.rung in RUNGS
        assert proof.arch == "cpu" or proof.arch in arch.ARCHS
        assert proof.implementation in {i.name for i in OPS[proof.op].implementations}
        assert (ROOT / proof.evidence).is_file()


def test_every_op_is_proven_by_being_there():
    for op in OPS.values():
        proven = {(p.implementation, p.arch): p.rung for p in proofs() if p.op == op.name}
        kernel = op.verification.implementation
        assert proven["torch", "cpu"] == "reference"
        assert proven.get((kernel, "cpu")) == ("interpreted" if op.verification.kernels else None)
        assert all(proven[kernel, name] == "emulated" for name in EMULATED)
        for implementation in op.implementations:
            own = {name for other, name in proven if other == implementation.name}
            assert implementation.kernels is None or own == set(toolchain.TARGETS)


def test_where_no_data_has_a_config_nothing_is_compiled(monkeypatch):
    before = [proof for proof in proofs() if proof.rung in {"compiled", "emulated"}]
    table = choice._table
    monkeypatch.setattr(choice, "_table", lambda op, gfx: None if gfx == "gfx1100" else table(op, gfx))
    gone = set(before) - set(proofs.__wrapped__())
    assert {(proof.op, proof.arch) for proof in gone} == {
        (name, "gfx1100") for name, op in OPS.items() if op.verification.kernels
    }
    assert "hip" not in {proof.implementation for proof in gone}


def test_only_a_recorded_run_on_a_gpu_counts_as_tested():
    assert {proof for proof in proofs() if proof.rung == "tested"} == set(recorded())
    for proof in recorded():
        assert proof.rung == "tested"
        assert proof.evidence.startswith("benchmarks/")


def test_no_proof_stands_twice():
    keys = [(p.op, p.implementation, p.arch) for p in proofs()]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("evidence", sorted({proof.evidence for proof in proofs()} - {p.evidence for p in recorded()}))
def test_the_tests_that_are_named_run_over_every_op(evidence):
    text = (ROOT / evidence).read_text(encoding="utf-8")
    over = ("op", "OPS"), ("op", "IN_TRITON"), ("name", "OWN")
    assert any(f'parametrize("{name}", {names})' in text for name, names in over)
