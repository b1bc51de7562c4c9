from __future__ import annotations

import pickle

import pytest
import torch

from rocm_sd.ops import OPS, linear_geglu
from rocm_sd.ops.upsample_conv2d.op import parity_weights
from rocm_sd.tuning.search.calls import OpCall, TensorSpec, describe, make
from rocm_sd.tuning.search.watching import Watched, watched


def sent(call: OpCall) -> OpCall:
    """As a worker process gets it."""
    return pickle.loads(pickle.dumps(call))


def test_a_call_survives_its_way_to_a_worker():
    arguments = (torch.empty(2, 3).half(), None, 7.5, True, "nearest", (1, 2))
    call = describe("upsample", {"n": 2, "dtype": "float16"}, arguments)
    assert sent(call) == call
    assert hash(sent(call)) == hash(call)


def test_views_of_one_storage_stay_so():
    packed = torch.empty(2, 5, 3, 4, 8)
    call = describe("attention", {}, (*packed.unbind(2), None))
    q, k, v, scale = make(sent(call), torch.device("cpu"))
    assert scale is None
    for ours, theirs in zip((q, k, v), packed.unbind(2), strict=True):
        assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())
    assert k.data_ptr() - q.data_ptr() == packed.unbind(2)[1].data_ptr() - packed.unbind(2)[0].data_ptr()
    assert not torch.equal(q, k)


def test_a_view_far_into_a_large_storage_takes_little_memory():
    arena = torch.empty(1_000_000)
    given = arena[700_003:700_103].view(10, 10)
    spec = describe("geglu", {}, (given,)).arguments[0]
    assert spec.extent < 200
    # As far from an aligned address as before.
    assert spec.offset == 700_003 % 64
    (made,) = make(OpCall("geglu", (), (spec,)), torch.device("cpu"))
    assert made.shape == (10, 10)


def test_expanded_and_empty_tensors():
    given = (torch.empty(1, 4).expand(3, 4), torch.empty(0, 4), torch.empty(0, 2))
    made = make(describe("geglu", {}, given), torch.device("cpu"))
    assert [(t.shape, t.stride()) for t in made] == [(t.shape, t.stride()) for t in given]


def test_integers_are_indices_that_every_table_has():
    (step,) = make(describe("guided_step", {}, (torch.full((), 17),)), torch.device("cpu"))
    assert step.dtype == torch.int64
    assert step.item() == 0


def test_weights_keep_the_size_of_what_they_multiply():
    x, weight = make(describe("conv2d", {}, (torch.empty(2, 64, 8, 8), torch.empty(64, 64, 3, 3)), ("x", "weight")),
                     torch.device("cpu"))  # fmt: skip
    y = torch.nn.functional.conv2d(x, weight)
    assert 0.8 < y.std().item() < 1.2


def test_what_follows_from_other_arguments_does():
    x, weight = torch.empty(1, 4, 3, 3), torch.empty(5, 4, 3, 3)
    call = describe("upsample_conv2d", {}, (x, weight, None, parity_weights(weight)))
    made = make(call, torch.device("cpu"))
    assert torch.equal(made[3], parity_weights(made[1]))


def test_nothing_is_allocated_on_meta():
    call = OpCall("geglu", (), (TensorSpec((2**20, 2**20), (2**20, 1), "float16", 0, 0),))
    assert make(call, torch.device("meta"))[0].shape == (2**20, 2**20)


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.verification is not None])
def test_every_ops_samples_come_back_as_the_same_problem(name):
    verification = OPS[name].verification
    for sample in verification.small:
        arguments = sample.make()
        call = sent(describe(name, verification.problem(*arguments), arguments))
        made = make(call, torch.device("cpu"))
        assert tuple(verification.problem(*made).items()) == call.problem
        OPS[name].implementations[0](*made)


def test_what_a_composed_implementation_would_call_is_seen_too():
    """`library_geglu` is as fast as the `geglu` and the product that it calls, which nobody else may call."""
    seen = Watched()
    x, weight = torch.randn(6, 8), torch.randn(24, 8)
    with watched(seen, answer_stock=True):
        y = linear_geglu(x, weight, torch.randn(24))
    assert y.shape == (6, 12)
    counts = {each.call.op: each.count for each in seen.traced()}
    assert counts == {"linear_geglu": 1, "linear_residual": 1, "geglu": 1}
