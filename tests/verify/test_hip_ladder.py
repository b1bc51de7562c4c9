"""The kernels of `op:hip` on the proof ladder: gates for six architectures, numbers on three."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("tinygrad", reason="the emulator decodes by tinygrad's tables")
pytest.importorskip("triton", reason="the ladder compares with Triton's kernels")

from rocm_sd.errors import InvalidOption
from rocm_sd.kernels.hip import toolchain
from rocm_sd.ops import OPS
from rocm_sd.ops.registry import KernelPromise
from rocm_sd.verify import ladder
from rocm_sd.verify.hip_runner import emulated_hip
from rocm_sd.verify.proofs import proofs

try:
    toolchain.find_compiler()
except toolchain.NoHipCompiler as error:
    pytest.skip(str(error), allow_module_level=True)

OWN = [name for name in ladder.names() if ":" in name]


def climb(name, gfx, rung):
    """In this process: a worker's start costs more than the task."""
    return ladder.Outcome(**ladder.climb(name, gfx, rung))


@pytest.mark.parametrize("gfx", toolchain.TARGETS)
@pytest.mark.parametrize("name", OWN)
def test_every_kernel_passes_every_gate_without_spills(name, gfx):
    outcome = climb(name, gfx, 3)
    assert (outcome.op, outcome.arch, outcome.rung, outcome.state) == (name, gfx, "compiled", "passed"), (
        outcome.sentence
    )
    for facts in outcome.figures["kernels"].values():
        assert facts["vgpr_spills"] + facts["sgpr_spills"] + facts["scratch"] == 0


@pytest.mark.parametrize("gfx", ladder.EMULATED)
@pytest.mark.parametrize("name", OWN)
def test_every_kernel_computes_the_right_numbers_on_the_emulator(name, gfx):
    outcome = climb(name, gfx, 4)
    assert outcome.state == "passed", outcome.sentence
    assert outcome.figures["largest_error"] <= outcome.figures["allowed"]
    op, _, implementation = name.partition(":")
    assert set(outcome.figures["kernels"]) == set(OPS[op].implementation(implementation).kernels.promises)


def test_hip_climbs_by_name_and_has_no_rungs_without_an_architecture():
    tasks = ladder.plan(["layout_copy:hip"])
    assert {task.arch for task in tasks} == set(toolchain.TARGETS)
    assert {task.rung for task in tasks} == {3, 4, 5}
    assert ladder.plan(["layout_copy:hip"], rungs=[1, 2]) == []
    with pytest.raises(InvalidOption, match="layout_copy:hip"):
        ladder.plan(["layout_copy:cuda"])


def test_a_worker_climbs_it_and_what_cannot_be_climbed_is_told(monkeypatch):
    outcomes = ladder.verify(ladder.plan(["layout_copy:hip"], ["gfx1030", "gfx908"]))
    found = {(o.arch, o.rung): (o.state, o.sentence) for o in outcomes}
    assert found["gfx1030", "compiled"][0] == "passed"
    assert found["gfx1030", "emulated"] == ("skipped", "emulated on gfx1100, gfx1201, gfx942")
    assert found["gfx908", "compiled"] == ("skipped", "the HIP kernels have no code for gfx908")
    assert found["gfx1030", "tested"] == ("skipped", "never ran there")
    monkeypatch.setattr(toolchain, "CLANGS", ("no-such-clang",))
    monkeypatch.setenv("ROCM_PATH", "/nowhere")
    (outcome,) = ladder.verify(ladder.plan(["layout_copy:hip"], ["gfx1100"], [3]))
    assert outcome.state == "skipped"
    assert "apt-get install clang-19" in outcome.sentence


def test_a_recorded_run_counts_for_its_own_kernels_alone(monkeypatch):
    recorded = replace(
        proofs()[0], op="upsample", implementation="hip", arch="gfx1100", rung="tested", evidence="x.json"
    )
    monkeypatch.setattr(ladder, "proofs", lambda: (recorded,))
    for name, state in (("upsample:hip", "passed"), ("upsample", "skipped")):
        (outcome,) = ladder.verify(ladder.plan([name], ["gfx1100"], [5]))
        assert outcome.state == state


def test_a_promise_that_is_not_kept_fails_by_kernel_and_gate():
    op = OPS["group_norm_silu"]
    strict = replace(
        ladder._of_its_own(op, "hip"),
        promises={name: KernelPromise(uses_dot=True) for name in op.implementation("hip").kernels.promises},
    )
    state, sentence, _ = ladder._compiled(op, strict, "gfx1100")
    assert state == "failed"
    assert "group_norm_silu_apply (1x256x512x512" in sentence
    assert "matrix: 0 matrix instructions" in sentence


def test_inside_it_the_ops_implementation_runs_on_the_architectures_own_product():
    op = OPS["upsample"]
    arguments = op.verification.small[0].make()
    with emulated_hip("gfx942", execute=False) as run:
        op.implementation("hip").run(*arguments, config={})
    assert [call.code.arch.name for call in run.calls] == ["gfx942"]
    assert run.calls[0].counters is None
    assert op.implementation("hip").why_not(op.verification.problem(*arguments), arguments[0].device)


@pytest.mark.parametrize("name", OWN)
def test_the_proofs_tell_of_it_what_is_tested_here(name):
    op, _, implementation = name.partition(":")
    proven = {p.arch: p.rung for p in proofs() if (p.op, p.implementation) == (op, implementation)}
    expected = {gfx: "emulated" if gfx in ladder.EMULATED else "compiled" for gfx in toolchain.TARGETS}
    assert proven == expected
