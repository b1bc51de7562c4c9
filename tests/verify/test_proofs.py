from __future__ import annotations

from pathlib import Path

from rocm_sd import arch
from rocm_sd.ops import OPS
from rocm_sd.verify.proofs import RUNGS, proofs

ROOT = Path(__file__).parents[2]


def test_every_proof_names_what_exists():
    assert proofs()
    for proof in proofs():
        assert proof.rung in RUNGS
        assert proof.arch == "cpu" or proof.arch in arch.ARCHS
        assert proof.implementation in {i.name for i in OPS[proof.op].implementations}
        assert (ROOT / proof.evidence).is_file()


def test_only_a_recorded_run_on_a_gpu_counts_as_tested():
    for proof in proofs():
        if proof.rung == "tested":
            assert proof.evidence.startswith("benchmarks/")


def test_no_proof_is_told_twice():
    keys = [(p.op, p.implementation, p.arch) for p in proofs()]
    assert len(keys) == len(set(keys))
