"""A model goes to a worker as shapes, and comes up there as its class made it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import rocm_sd
from model_inputs import sdxl_inputs, unet_inputs
from rocm_sd.engine.calibration.skeleton import Skeleton, described_call, model_key
from tiny_models import unet_of, vae_of

CPU = torch.device("cpu")


def rebuilt(model, kwargs, *, share=False):
    return Skeleton.of(model, (), kwargs).rebuilt(CPU, share=share)


def inputs():
    return {**unet_inputs(), "sample": unet_inputs()["sample"].float(), "return_dict": False}


def result_of(call):
    with torch.no_grad():
        return call()[0]


def test_no_value_of_a_weight_is_taken_along():
    unet = unet_of("sd15").double()
    nn.init.constant_(unet.conv_in.weight, 0.1234567890123)
    skeleton = Skeleton.of(unet, (), unet_inputs())
    assert unet.conv_in.weight.detach().numpy().tobytes()[:8] not in skeleton.content
    assert len(skeleton.content) < skeleton.weights / 10
    assert skeleton.weights == sum(each.nbytes for each in unet.parameters())


def test_the_same_classes_shapes_and_dtypes_come_up():
    unet = unet_of("sdxl").double()
    other = rebuilt(unet, sdxl_inputs()).model
    assert [type(m) for m in other.modules()] == [type(m) for m in unet.modules()]
    facts = [(name, p.shape, p.dtype) for name, p in unet.named_parameters()]
    assert [(name, p.shape, p.dtype) for name, p in other.named_parameters()] == facts
    assert not any(p.device.type == "meta" for p in (*other.parameters(), *other.buffers()))


def test_what_it_computes_is_finite_and_of_the_size_of_its_input():
    made = rebuilt(unet_of("sdxl").double(), {**sdxl_inputs(), "return_dict": False})
    found = result_of(made)
    assert found.isfinite().all()
    assert 0.01 < float(found.std()) < 100


def test_hooks_and_forwards_stay_behind():
    unet = unet_of("sd15").double()
    unet.conv_in.register_forward_hook(lambda *_: None)
    rocm_sd.optimize(unet)
    unet.mid_block.forward = lambda *_: None
    made = rebuilt(unet, unet_inputs()).model
    assert not any("forward" in module.__dict__ or module._forward_hooks for module in made.modules())


def test_a_rule_works_on_what_came_up():
    made = rebuilt(unet_of("sd15").float(), {**inputs(), "encoder_hidden_states": torch.randn(2, 5, 32)})
    before = result_of(made)
    rocm_sd.optimize(made.model)
    torch.testing.assert_close(result_of(made), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_blocks_that_are_alike_may_share_their_weights(family):
    unet = unet_of(family, layers_per_block=3).float()
    given = unet_inputs() if family == "sd15" else sdxl_inputs()
    given = {
        "return_dict": False,
        **{n: v.float() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for n, v in given.items()},
    }
    if family == "sdxl":
        given["added_cond_kwargs"] = {name: value.float() for name, value in given["added_cond_kwargs"].items()}
    apart, shared = rebuilt(unet, given), rebuilt(unet, given, share=True)

    def memory(made):
        return sum({p.data_ptr(): p.nbytes for p in made.model.parameters()}.values())

    assert memory(shared) < 0.8 * memory(apart)
    # Weights of one block are laid together; those of its twin are the same, and lie so already.
    before = result_of(shared)
    rocm_sd.optimize(shared.model)
    torch.testing.assert_close(result_of(shared), before, rtol=1e-4, atol=1e-4)


def test_one_tensor_in_two_places_stays_one():
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    made = rebuilt(tied, {}).model
    assert made[0].weight is made[1].weight


def test_what_cannot_be_pickled_is_said():
    unet = unet_of("sd15")
    unet.of_the_user = lambda: None
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        Skeleton.of(unet, (), {})


def test_a_key_is_of_the_architecture_and_the_dtype():
    one, other = unet_of("sd15"), unet_of("sd15")
    assert model_key(one) == model_key(other) == model_key(copy.deepcopy(one))
    assert model_key(one) != model_key(unet_of("sd15").double())
    assert model_key(one) != model_key(unet_of("sd15", layers_per_block=2))
    rocm_sd.optimize(one)
    assert model_key(one) == model_key(other)
    decoder = vae_of().decoder
    assert model_key(decoder).startswith("Decoder ")
    assert model_key(decoder) != model_key(vae_of().decoder.half())


def test_a_call_is_described_by_its_shapes_in_any_order_of_names():
    sample, text = torch.zeros(2, 4, 8, 8), torch.zeros(2, 5, 32)
    assert described_call((), {"sample": sample, "text": text}) == described_call((), {"text": text, "sample": sample})
    assert described_call((sample,), {"flag": True}) == "2x4x8x8 float32"
    assert described_call((sample.half(), {"nested": [text]}), {}) == "2x4x8x8 float16, 2x5x32 float32"
