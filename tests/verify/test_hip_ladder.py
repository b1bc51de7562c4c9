"""The kernels of `op:hip` on the proof ladder: gates for six architectures, numbers on three."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("tinygrad", reason="the emulator decodes by tinygrad's tables")
pytest.importorskip("triton", reason="the ladder compares with Triton's kernels")

from rocm_sd import arch as archs
from rocm_sd import ops
from rocm_sd.errors import InvalidOption
from rocm_sd.kernels.hip import toolchain
from rocm_sd.ops import OPS, registry
from rocm_sd.ops.definition import KernelPromise
from rocm_sd.ops.group_norm_silu.op import group_norm_silu_
from rocm_sd.tuning import choice
from rocm_sd.verify import ladder
from rocm_sd.verify.gates import check
from rocm_sd.verify.isa import report
from rocm_sd.verify.proofs import proofs, recorded
from rocm_sd.verify.runner import emulated_hip

try:
    toolchain.find_compiler()
except toolchain.NoHipCompiler as error:
    pytest.skip(str(error), allow_module_level=True)

OWN = [name for name in ladder.names() if ":" in name]


def climb(name, gfx, rung):
    """In this process: a worker's start costs more than the task."""
    return ladder.climb(ladder.Task(name, gfx, rung))


@pytest.mark.parametrize("gfx", toolchain.TARGETS)
@pytest.mark.parametrize("name", OWN)
def test_every_kernel_passes_every_gate_without_spills(name, gfx):
    outcome = climb(name, gfx, 3)
    assert (outcome.op, outcome.arch, outcome.rung, outcome.state) == (name, gfx, "compiled", "passed"), (
        outcome.sentence
    )
    op, _, implementation = name.partition(":")
    promised = set(OPS[op].implementation(implementation).kernels.promises)
    # The last resort of a layout's copy is for what no real call has.
    assert promised - {kernel.partition(" ")[0] for kernel in outcome.figures["kernels"]} <= {"layout_copy_plain"}
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


@pytest.mark.parametrize(
    "name", [name for name in OWN if OPS[name.partition(":")[0]].implementation("hip").kernels.space]
)
def test_every_config_that_a_search_tries_passes_the_gates(name):
    op = OPS[name.partition(":")[0]]
    hip, arguments = op.implementation("hip"), op.verification.real[0].make(filled=False)
    configs = list(hip.kernels.space(op.verification.problem(*arguments), archs.get("gfx1030")))
    # All zeros: no config of its own, the launcher takes the first for the call.
    assert hip.default in configs or not any(hip.default.to_dict().values())
    for config in configs:
        with emulated_hip("gfx1030", execute=False) as run:
            hip(*arguments, config=config)
        for call in run.calls:
            gates = check(report(call.code), hip.kernels.promises[call.kernel])
            assert [gate.sentence for gate in gates if gate.ok is False] == [], (config, call.kernel)


def test_hip_climbs_by_name_and_has_no_rungs_without_an_architecture():
    tasks = ladder.plan(["layout_copy:hip"])
    assert {task.arch for task in tasks} == set(toolchain.TARGETS)
    assert {task.rung for task in tasks} == {3, 4, 5}
    assert ladder.plan(["layout_copy:hip"], rungs=[1, 2]) == []
    with pytest.raises(InvalidOption, match="layout_copy:hip"):
        ladder.plan(["layout_copy:cuda"])


def test_a_worker_climbs_it_and_gives_the_reason_where_it_cannot(monkeypatch):
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
    ran = replace(recorded()[0], op="upsample", implementation="hip", arch="gfx1100", evidence="x.json")
    monkeypatch.setattr(ladder, "recorded", lambda: (ran,))
    for name, state in (("upsample:hip", "passed"), ("upsample", "skipped")):
        (outcome,) = ladder.verify(ladder.plan([name], ["gfx1100"], [5]))
        assert outcome.state == state


def test_a_promise_that_is_not_kept_fails_by_kernel_and_gate():
    op = OPS["group_norm_silu"]
    strict = replace(
        op.verification.of_its_own(op.implementation("hip")),
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
        op.implementation("hip")(*arguments)
    assert [call.code.arch.name for call in run.calls] == ["gfx942"]
    assert run.calls[0].counters is None
    assert op.implementation("hip").why_not(op.verification.problem(*arguments), arguments[0].device)


@pytest.mark.parametrize("name", OWN)
def test_the_proofs_are_what_is_tested_here(name):
    op, _, implementation = name.partition(":")
    proven = {p.arch: p.rung for p in proofs() if (p.op, p.implementation) == (op, implementation)}
    expected = {gfx: "emulated" if gfx in ladder.EMULATED else "compiled" for gfx in toolchain.TARGETS}
    assert proven == expected


def test_the_gradient_is_the_ops_own():
    x = torch.randn(1, 16, 4, 4, dtype=torch.float16, requires_grad=True)
    with emulated_hip("gfx1201") as run:
        y = ops.layout_copy(x, True, implementation="hip")
        y.backward(torch.arange(256.0).half().reshape(1, 16, 4, 4))
    assert [call.kernel for call in run.calls] == ["layout_copy_wide"]
    assert torch.equal(y, x)
    assert torch.equal(x.grad.flatten(), torch.arange(256.0).half())


@pytest.mark.parametrize("whole_values", [32, 0])
def test_a_norm_may_write_over_its_own_map(whole_values, monkeypatch):
    """As `overwrites` promises: in one kernel, and in three."""
    table = {"implementation": "hip", "config": {"whole_values": whole_values, "slices_per_cu": 4}, "why": "timed"}
    monkeypatch.setattr(choice, "_table", lambda *_: {"static": table})
    image = torch.randn(2, 8, 8, 32).half().permute(0, 3, 1, 2)
    stock = OPS["group_norm_silu"].implementation("torch")(image, 4, None, None, None, 1e-5, True)
    registry.forget_choices()
    try:
        with emulated_hip("gfx1100") as run:
            y = group_norm_silu_(image, 4)
    finally:
        registry.forget_choices()
    assert y is image
    assert len(run.calls) == (1 if whole_values else 3)
    torch.testing.assert_close(y, stock, atol=4e-3, rtol=4e-3)


def test_any_strides_an_empty_batch_and_weights_of_another_dtype():
    with emulated_hip("gfx1100"):
        odd = torch.randn(3, 2, 40).half().transpose(0, 1)
        weight, bias = torch.randn(40), torch.randn(80)[::2]
        given = (odd, odd + 1, weight, bias, 1e-5)
        ours = ops.layer_norm_residual(*given, implementation="hip")
        theirs = ops.layer_norm_residual(*given, implementation="torch")
        for actual, stock in zip(ours, theirs, strict=True):
            assert actual.is_contiguous()
            torch.testing.assert_close(actual, stock, atol=4e-3, rtol=4e-3)
        x, matrix = torch.randn(24, 6).half().T, torch.randn(24, 16).half().T
        y = ops.linear_residual(x, matrix, implementation="hip")
        torch.testing.assert_close(y, (x.float() @ matrix.float().T).half(), atol=1e-2, rtol=1e-2)
        assert ops.upsample(torch.randn(0, 8, 4, 4).half(), implementation="hip").shape == (0, 8, 8, 8)
        assert ops.linear_residual(torch.empty(0, 24).half(), matrix, implementation="hip").shape == (0, 16)
        same = torch.randn(1, 8, 4, 4).half()
        assert ops.layout_copy(same, False, implementation="hip").data_ptr() != same.data_ptr()


def test_attention_reads_packed_projections_in_place_and_copies_what_begins_between_16_bytes(monkeypatch):
    from rocm_sd.kernels.hip import attention as launcher

    handed, launch = [], launcher.launch
    monkeypatch.setattr(launcher, "launch", lambda *given: handed.append(given[:3]) or launch(*given))
    packed = torch.randn(1, 9, 3, 2, 40).half()
    # A head of 36 in rows of 40 is none that there is; these rows of 40 begin 4 values in.
    shifted = torch.randn(1, 9, 2, 44).half()[..., 4:]
    columns = torch.randn(1, 9, 40, 2).half().transpose(2, 3)
    with emulated_hip("gfx1100"):
        for q, k, v in (packed.unbind(2), (shifted, shifted, shifted), (columns, columns, columns)):
            for scale in (None, -0.3, 0.0):
                ours = ops.attention(q, k, v, scale, implementation="hip")
                stock = ops.attention(q, k, v, scale, implementation="torch")
                torch.testing.assert_close(ours, stock, atol=4e-3, rtol=4e-3)
        assert ops.attention(packed[:0, :, 0], packed[:0, :, 1], packed[:0, :, 2], implementation="hip").numel() == 0
    in_place = [
        all(a.data_ptr() == b.data_ptr() for a, b in zip(given, packed.unbind(2), strict=True)) for given in handed
    ]
    # Where the scale is not above zero, the queries are others: the same products have another sign.
    assert in_place == [True, *[False] * 8]
    assert handed[3][0].stride() == (720, 80, 40, 1)


def test_convolutions_take_any_layout_and_parts_of_another_dtype():
    x, concat = torch.randn(1, 24, 5, 6).half(), torch.randn(1, 8, 5, 6).half()
    weight, bias, add = torch.randn(16, 32, 3, 3) / 17, torch.randn(32)[::2], torch.randn(1, 16)
    residual = torch.randn(1, 16, 5, 6)
    with emulated_hip("gfx1201"):
        given = (x, weight, bias, add, residual, 1, 1)
        ours = ops.conv2d(*given, implementation="hip", concat=concat)
        stock = ops.conv2d(*given, implementation="torch", concat=concat)
        assert ours.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(ours, stock, atol=1e-2, rtol=1e-2)
        ours, stock = (ops.upsample_conv2d(x, weight[:, :24], bias, implementation=name) for name in ("hip", "torch"))
        assert ours.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(ours, stock, atol=1e-2, rtol=1e-2)
        assert ops.conv2d(x[:0], weight[:, :24], implementation="hip").shape == (0, 16, 3, 4)
        assert ops.upsample_conv2d(x[:0], weight[:, :24], implementation="hip").shape == (0, 16, 10, 12)
        rows, matrix = torch.randn(24, 6).half().T, torch.randn(24, 32).half().T / 5
        ours, stock = (ops.linear_geglu(rows, matrix, implementation=name) for name in ("hip", "torch"))
        torch.testing.assert_close(ours, stock, atol=1e-2, rtol=1e-2)
        assert ops.linear_geglu(rows[:0], matrix, implementation="hip").shape == (0, 16)
