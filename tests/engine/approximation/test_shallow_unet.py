"""A whole pass has the bits of the UNet's own forward, and so has a shallow one with the features of the same call."""

from __future__ import annotations

import pytest
import torch
from diffusers import ControlNetModel

import rocm_sd
from pipelines import small_blocks_too
from rocm_sd.engine.approximation import shallow_unet
from tiny_models import unet_of

FAMILIES = ["sd15", "sdxl"]


def arguments(unet, size=(8, 8), batch=2, seed=0):
    random = torch.Generator().manual_seed(seed)
    width = unet.config.cross_attention_dim
    given = {
        "sample": torch.randn(batch, 4, *size, generator=random),
        "timestep": torch.tensor(500),
        "encoder_hidden_states": torch.randn(batch, 7, width, generator=random),
        "added_cond_kwargs": None,
    }
    if unet.config.addition_embed_type == "text_time":
        pooled = unet.config.projection_class_embeddings_input_dim - 6 * unet.config.addition_time_embed_dim
        given["added_cond_kwargs"] = {
            "text_embeds": torch.randn(batch, pooled, generator=random),
            "time_ids": torch.randn(batch, 6, generator=random),
        }
    return given


def run(unet, depth, features, given):
    rest = (
        "cross_attention_kwargs", "timestep_cond", "down_block_additional_residuals", "mid_block_additional_residual",
    )  # fmt: skip
    with torch.no_grad():
        return shallow_unet.run(unet, depth, features, dict.fromkeys(rest) | given)


def own(unet, given):
    with torch.no_grad():
        return unet(**given, return_dict=False)[0]


@pytest.mark.parametrize("size", [(8, 8), (5, 9), (12, 8)])
@pytest.mark.parametrize("optimised", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_depth_has_the_forwards_bits(monkeypatch, family, optimised, size):
    unet = unet_of(family)
    if optimised:
        small_blocks_too(monkeypatch, "0")
        rocm_sd.optimize(unet)
    given = arguments(unet, size)
    expected = own(unet, given)
    for depth in range(1, shallow_unet.deepest(unet) + 1):
        assert shallow_unet.why_not(unet, depth) is None
        answer, features = run(unet, depth, None, given)
        assert torch.equal(answer, expected)
        assert torch.equal(run(unet, depth, features, given)[0], expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_controlnets_residuals_are_added(family):
    unet = unet_of(family)
    given = arguments(unet)
    controlnet = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(16, 16))
    for parameter in controlnet.parameters():
        parameter.data += 0.01
    with torch.no_grad():
        down, mid = controlnet(**given, controlnet_cond=torch.randn(2, 3, 16, 16), return_dict=False)
    given |= {"down_block_additional_residuals": down, "mid_block_additional_residual": mid}
    expected = own(unet, given)
    for depth in (1, 2, 3):
        answer, features = run(unet, depth, None, given)
        assert torch.equal(answer, expected)
        assert torch.equal(run(unet, depth, features, given)[0], expected)


def test_only_shallow_layers_are_computed():
    """Deep layers of NaN are not noticed, and shallow ones are."""
    unet = unet_of("sd15")
    given = arguments(unet)
    features = run(unet, 1, None, given)[1]
    unet.mid_block.resnets[0].conv1.weight.data.fill_(float("nan"))
    assert run(unet, 1, features, given)[0].isfinite().all()
    unet.conv_in.weight.data.fill_(float("nan"))
    assert run(unet, 1, features, given)[0].isnan().any()


def test_what_has_no_shallow_pass_says_why():
    unet = unet_of("sd15")
    assert "layers to leave out" in shallow_unet.why_not(unet, 99)
    unet.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    assert "FreeU" in shallow_unet.why_not(unet, 1)
    unet.disable_freeu()
    assert shallow_unet.why_not(unet, 1) is None
    unet.down_blocks[0].__class__ = type("Own", (type(unet.down_blocks[0]),), {})
    assert "Own" in shallow_unet.why_not(unet, 1)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"class_labels": 1}, "class_labels"),
        ({"attention_mask": 1}, "attention_mask"),
        ({"cross_attention_kwargs": {"gligen": {}}}, "GLIGEN"),
        ({"down_block_additional_residuals": []}, "adapter"),
        ({"down_block_additional_residuals": [], "mid_block_additional_residual": 1}, None),
        ({"cross_attention_kwargs": {"scale": 1}}, None),
    ],
)
def test_calls_that_are_not_known(given, why):
    found = shallow_unet.why_not_call(given)
    assert (found is None) if why is None else (why in found)


@pytest.mark.parametrize("family", FAMILIES)
def test_which_modules_a_shallow_pass_runs(family):
    """Each that is named is called, and no other has parameters that are read."""
    unet = unet_of(family)
    given, called = arguments(unet), []
    for module in unet.modules():
        module.register_forward_pre_hook(lambda module, *_: called.append(module), with_kwargs=True)
    for depth in range(1, shallow_unet.deepest(unet) + 1):
        _, features = run(unet, depth, None, given)
        called.clear()
        run(unet, depth, features, given)
        told = shallow_unet.used(unet, depth)
        assert {*told} <= {*called}
        inside = {part for module in told for part in module.modules()}
        assert {module for module in called if any(True for _ in module.parameters(recurse=False))} <= inside
