from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

import rocm_sd.tuning
from rocm_sd import arch as archs
from rocm_sd.errors import InvalidOption, MissingDependency
from rocm_sd.kernels.hip import toolchain
from rocm_sd.ops import OPS
from rocm_sd.tuning import lookup
from rocm_sd.verify import ladder
from rocm_sd.verify.compiler import targets
from rocm_sd.verify.emulator import OutOfBounds
from rocm_sd.verify.proofs import RUNGS, proofs, recorded

pytest.importorskip("triton", reason="AMD code is compiled by Triton")

DATA = Path(rocm_sd.tuning.__file__).parent / "data"
TARGETS = [a.name for a in targets()]
# The kernels of the others are in HIP alone: test_hip_ladder.py.
IN_TRITON = [name for name, op in OPS.items() if op.verification.kernels]


@cache
def climbed(op, gfx, rung):
    """By a worker, where kernels are compiled and not interpreted; what two tests look at is proven once."""
    (outcome,) = ladder.verify(ladder.plan([op], [gfx], [rung]))
    return outcome


def test_nothing_named_means_everything():
    tasks = ladder.plan()
    own = [name for name in ladder.names() if name not in OPS]
    assert len(tasks) == len(OPS) * (2 + 3 * len(TARGETS)) + len(own) * 3 * len(toolchain.TARGETS)
    assert {task.op for task in tasks} == set(ladder.names())
    assert {task.arch for task in tasks if task.rung <= 2} == {"cpu"}
    assert [task.rung_name for task in ladder.plan(["conv2d"], ["gfx1100"])] == list(RUNGS)


@pytest.mark.parametrize(
    ("named", "choice"),
    [
        ({"ops": ["no_such_op"]}, "group_norm_silu"),
        ({"architectures": ["gfx9999"]}, "gfx1100"),
        ({"architectures": ["sm_90"]}, "gfx1100"),
        ({"rungs": [6]}, "1, 2, 3, 4, 5"),
    ],
)
def test_what_is_not_known_is_refused_with_the_choices(named, choice):
    with pytest.raises(InvalidOption, match=choice):
        ladder.plan(**named)


@pytest.mark.parametrize("op", IN_TRITON)
def test_every_op_has_data_and_a_proof_for_every_gfx_that_triton_compiles_for(op):
    # What Triton does not compile for may have data for HIP.
    named = {file.parent.name for file in DATA.glob(f"gfx*/{op}.json")}
    assert {name for name in named if archs.get(name).triton_supported} == set(TARGETS)
    proven = {p.arch: p.rung for p in proofs() if p.op == op and p.implementation != "hip" and p.arch.startswith("gfx")}
    assert sorted(proven) == sorted(TARGETS)
    assert {arch for arch, rung in proven.items() if rung == "emulated"} == set(ladder.EMULATED)


def test_every_op_declares_what_the_ladder_needs():
    for op in OPS.values():
        assert op.verification is not None
        assert op.verification.implementation in {i.name for i in op.implementations}
        assert op.verification.small
        assert op.verification.real


@pytest.mark.parametrize("gfx", TARGETS)
@pytest.mark.parametrize("op", IN_TRITON)
def test_every_kernel_passes_every_gate_on_every_gfx(op, gfx):
    outcome = climbed(op, gfx, 3)
    assert outcome.state == "passed", outcome.sentence
    assert outcome.figures["kernels"]
    for facts in outcome.figures["kernels"].values():
        assert facts["vgpr_spills"] + facts["sgpr_spills"] + facts["scratch"] == 0
        assert {"spills", "scratch", "lds"} <= {gate["name"] for gate in facts["gates"] if gate["ok"] is not None}


@pytest.mark.parametrize("gfx", ladder.EMULATED)
@pytest.mark.parametrize("op", IN_TRITON)
def test_every_kernel_computes_the_right_numbers_on_the_emulator(op, gfx):
    outcome = climbed(op, gfx, 4)
    assert outcome.state == "passed", outcome.sentence
    assert outcome.figures["largest_error"] <= outcome.figures["allowed"]
    # Every kernel that the op has was executed, not only the one that the first sample happens to need.
    assert set(outcome.figures["kernels"]) == set(OPS[op].verification.promises)


@pytest.mark.parametrize("gfx", TARGETS)
def test_what_writes_the_picture_stores_16_bytes_at_a_time(gfx):
    """The gates look at loads only."""
    outcome = climbed("group_norm_silu", gfx, 3)
    applies = {name: k for name, k in outcome.figures["kernels"].items() if name.startswith("_apply")}
    assert applies
    # A lane that has read 16 bytes of halves has 8 bytes in 8 bits to write.
    halves = {name: k for name, k in applies.items() if ", to " not in name}
    assert halves
    assert len(halves) < len(applies)
    assert all(set(k["global_stores"]) == {16} for k in halves.values())
    assert all(set(k["global_stores"]) <= {8, 16} for k in applies.values())


def test_the_reference_and_the_interpreted_kernels_are_as_near_to_float64_as_stock():
    seen = []
    outcomes = ladder.verify(ladder.plan(["group_norm_silu"], ["gfx1100"], [1, 2]), seen.append)
    assert [(o.rung, o.state) for o in outcomes] == [("reference", "passed"), ("interpreted", "passed")]
    assert len(seen) == 2
    for outcome in outcomes:
        assert outcome.figures["largest_error"] <= outcome.figures["allowed"]
        assert outcome.figures["samples"] == len(OPS["group_norm_silu"].verification.small)


def test_an_op_without_a_kernel_in_triton_has_its_reference_alone():
    (name,) = set(OPS) - set(IN_TRITON)
    outcomes = ladder.verify(ladder.plan([name], ["gfx1100"], [1, 2, 3, 4, 5]))
    assert [outcome.state for outcome in outcomes] == ["passed", *["skipped"] * 4]
    assert {outcome.sentence for outcome in outcomes[1:]} == {f"it has no kernel in Triton: see {name}:hip"}


def test_where_nothing_runs_the_reason_is_given(monkeypatch):
    monkeypatch.setattr(ladder, "lookup", lambda op, gfx, _problem: lookup(op, f"{gfx} of no data", {}))
    outcomes = ladder.verify(ladder.plan(["group_norm_silu"], ["gfx1030", "gfx906", "gfx1101"], [3, 4, 5]))
    reasons = {(o.arch, o.rung): o.sentence for o in outcomes}
    assert {o.state for o in outcomes} == {"skipped"}
    assert "Triton does not compile for gfx1030" in reasons["gfx1030", "compiled"]
    assert "no data for group_norm_silu on gfx906 of no data" in reasons["gfx906", "compiled"]
    assert reasons["gfx906", "tested"] == "never ran there"


def test_a_recorded_run_on_a_card_is_read_from_the_proofs(monkeypatch):
    ran = replace(recorded()[0], op="group_norm_silu", arch="gfx1100", evidence="benchmarks/x.json")
    monkeypatch.setattr(ladder, "recorded", lambda: (ran,))
    (outcome,) = ladder.verify(ladder.plan(["group_norm_silu"], ["gfx1100"], [5]))
    assert (outcome.state, outcome.sentence) == ("passed", "recorded in benchmarks/x.json")


def test_a_wrong_result_fails_and_a_nan_too():
    op = OPS["group_norm_silu"]
    right, calls = op.verification.reference, list(op.verification.calls())
    for wrong in (lambda *a: right(*a).float() * 1.01, lambda *a: right(*a).float() * float("nan")):
        state, sentence, _ = ladder.numbers(op, op.verification, calls, lambda _name, arguments, f=wrong: f(*arguments))
        assert state == "failed"
        assert "largest error" in sentence
    state, _, _ = ladder.numbers(op, op.verification, calls, lambda _name, arguments: right(*arguments))
    assert state == "passed"


def test_an_op_that_breaks_a_gate_is_named_by_kernel_and_figure(monkeypatch):
    """Promising what `_fold` does not keep: wide loads."""
    op = OPS["group_norm_silu"]
    strict = {
        **op.verification.promises,
        "_fold": replace(op.verification.promises["_fold"], narrow_loads_because=None),
    }
    state, sentence, _ = ladder._compiled(op, replace(op.verification, promises=strict), "gfx1100")
    assert state == "failed"
    assert "_fold (2x320x64x64 in 32 groups, float16, no add): wide_loads: global loads in the main loop" in sentence


def test_what_the_emulator_forbids_is_a_failure_and_a_missing_package_is_not():
    task = ladder.Task("group_norm_silu", "gfx1100", 4)
    forbidden: Future[None] = Future()
    forbidden.set_exception(OutOfBounds("An access of 4 bytes lies in no buffer.", address=0x1500))
    outcome = ladder._outcome(task, forbidden)
    assert (outcome.state, outcome.rung) == ("failed", "emulated")
    assert "0x1500" in outcome.sentence
    missing: Future[None] = Future()
    missing.set_exception(MissingDependency("tinygrad", "verify"))
    with pytest.raises(MissingDependency, match="tinygrad"):
        ladder._outcome(task, missing)


def test_samples_are_the_same_each_time():
    for sample in OPS["group_norm_silu"].verification.small:
        first, second = sample.make(), sample.make()
        assert torch.equal(first[0], second[0])
