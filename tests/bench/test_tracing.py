from __future__ import annotations

import pytest
import torch

from rocm_sd.bench import tracing
from rocm_sd.errors import InvalidOption, ModelNotFound, Unsupported
from rocm_sd.numerics import outputs
from rocm_sd.ops import OPS, geglu
from rocm_sd.ops.group_norm_silu.op import group_norm_silu_
from rocm_sd.tuning.search import watching
from rocm_sd.tuning.search.calls import make
from rocm_sd.tuning.search.candidates import operation

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny():
    return tracing.workload("sd15-512-tiny", CPU)


@pytest.fixture(scope="module")
def traced(tiny):
    return tracing.trace(tiny).problems


def by_op(traced):
    return {name: [each for each in traced if each.call.op == name] for name in {each.call.op for each in traced}}


def test_every_op_of_a_picture_is_seen(traced):
    found = by_op(traced)
    settings = {"memory_format", "convolution_library"}
    blocks = {"attention", "conv2d", "group_norm_silu", "layer_norm_residual", "linear_geglu", "linear_residual"}
    # geglu: what an implementation of linear_geglu would call.
    assert set(found) == settings | blocks | {"upsample", "geglu"}
    assert len({(each.call.op, each.call.problem) for each in traced}) == len(traced)
    # Guidance doubles the batch of the UNet, at every step; the VAE draws one picture, once.
    norms = {dict(each.call.problem)["n"]: each.count for each in found["group_norm_silu"]}
    assert set(norms) == {1, 2}
    assert min(e.count for e in found["attention"] if dict(e.call.problem)["b"] == 2) >= 3


def test_a_call_rebuilt_is_the_same_problem_and_runs(traced):
    for each in traced:
        op = operation(each.call.op)
        arguments = make(each.call, CPU)
        assert tuple(op.verification.problem(*arguments).items()) == each.call.problem
        with torch.no_grad():
            for y in outputs(op.implementations[0](*arguments)):
                assert torch.isfinite(y).all()


def test_sizes_batches_and_ops_are_those_asked_for(tiny):
    sizes = tracing.trace(tiny, [(64, 64), (64, 128)], [1, 2]).of(["attention"]).problems
    assert {each.call.op for each in sizes} == {"attention"}
    seen = {(dict(e.call.problem)["b"], dict(e.call.problem)["s"]) for e in sizes}
    assert {(2, 64), (4, 64), (2, 128), (4, 128)} <= seen
    assert (tiny.facts.height, tiny.facts.width) == (64, 64)


def test_ops_are_as_they_were_afterwards(tiny):
    seen, x = watching.Watched(), torch.randn(4, 64)
    with pytest.raises(InvalidOption, match="multiples of 8"):
        tracing.trace(tiny, [(63, 64)])
    with pytest.raises(Unsupported), watching.watched(seen, answer_stock=True):
        geglu(geglu(x)[:, :1])
    geglu(x)
    assert [each.count for each in seen.traced()] == [1]


def test_a_norm_that_may_overwrite_its_input_is_seen_too(monkeypatch):
    """Where its kernel would be chosen, it would write into x: but stock torch computes what is watched."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    seen = watching.Watched()
    x = torch.randn(1, 8, 4, 4).contiguous(memory_format=torch.channels_last)
    with watching.watched(seen, answer_stock=False):
        y = group_norm_silu_(x, 4)
    assert torch.equal(y, OPS["group_norm_silu"].own["torch"](x, 4, None, None, None, 1e-5, True))
    assert [each.call.op for each in seen.traced()] == ["group_norm_silu"]


def test_while_watched_everything_is_stock_and_answers_are_fixed(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    seen = watching.Watched()
    x = torch.randn(4, 64, dtype=torch.float16)
    op = OPS["geglu"]
    problem = op.verification.problem(x)
    with watching.watched(seen, answer_stock=False):
        assert op.choose(problem, CPU).implementation == "triton"
        # Asked for by name, too: nothing that was never tried runs here.
        y = op.run(problem, CPU, "triton", x, None)
    with watching.watched(seen, answer_stock=True):
        assert op.choose(problem, CPU).implementation == "torch"
    assert torch.equal(y, op.implementations[0](x, None))
    assert [each.call.op for each in seen.traced()] == ["geglu"]


def test_a_model_that_is_not_there():
    with pytest.raises(ModelNotFound):
        tracing.workload("./no-such-model", CPU)


@pytest.mark.gpu
def test_on_a_gpu_both_ways_of_a_model_are_seen():
    made = tracing.workload("sd15-512-tiny", torch.device("cuda"))
    found = by_op(tracing.trace(made, [(256, 256)]).problems)
    assert {"conv2d", "upsample", "guided_step", "attention"} <= set(found)
