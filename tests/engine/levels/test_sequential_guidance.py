"""Guidance one half after the other: what the whole batch gives, in half of its memory."""

from __future__ import annotations

import copy
import pickle
import re
from functools import partial

import pytest
import torch
from accelerate.hooks import remove_hook_from_module
from diffusers import (
    FirstBlockCacheConfig,
    UNet2DConditionModel,
)
from diffusers.hooks import apply_group_offloading
from diffusers.models.attention_processor import PAGCFGIdentitySelfAttnProcessor2_0, SlicedAttnProcessor
from torch.utils._pytree import tree_leaves

from model_inputs import (
    control_inputs,
    doubled,
    flux_inputs,
    notes,
    offload_hook,
    residuals,
    same,
    sd3_inputs,
    sdxl_inputs,
    unet_inputs,
    values,
)
from rocm_sd.engine.levels import sequential_guidance
from rocm_sd.rewrite import RULES, apply, forwards, undo
from tiny_models import controlnet_of, flux_transformer, lora_of, sd3_transformer, unet_of

CPU = torch.device("cpu")
GPU = torch.device("cuda:0")


@pytest.fixture
def unet():
    torch.manual_seed(0)
    return doubled(unet_of("sd15"))


MODELS = {
    "sd15": (lambda: unet_of("sd15"), unet_inputs),
    "sd15 with classes": (
        lambda: unet_of("sd15", num_class_embeds=4),
        lambda: unet_inputs(4) | {"class_labels": torch.arange(4)},
    ),
    "sd15 with masks": (
        lambda: unet_of("sd15"),
        lambda: unet_inputs() | {"encoder_attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])},
    ),
    "lcm": (
        lambda: unet_of("sd15", time_cond_proj_dim=8),
        lambda: unet_inputs() | {"timestep_cond": values(2, 8), "cross_attention_kwargs": {"scale": 1.0}},
    ),
    "sdxl": (lambda: unet_of("sdxl"), sdxl_inputs),
    "with a controlnet": (lambda: unet_of("sd15"), lambda: unet_inputs() | residuals()),
    "controlnet": (lambda: controlnet_of("sd15"), control_inputs),
    "controlnet guessing": (lambda: controlnet_of("sd15"), lambda: control_inputs(4) | {"guess_mode": True}),
    "sd3": (sd3_transformer, sd3_inputs),
    "flux": (lambda: flux_transformer(guidance_embeds=True), flux_inputs),
}


@pytest.mark.parametrize("name", MODELS)
def test_halves_give_what_the_whole_gives(name):
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    model, given = doubled(build()), inputs()
    stock = model(**given)
    seen = []

    def whole(_model, inner, args, kwargs):
        seen.append((args[0] if args else kwargs[next(iter(given))]).shape[0])
        return inner(*args, **kwargs)

    forwards.surround(model, whole)
    installed = sequential_guidance.install(model)
    ours = model(**given)
    assert type(ours) is type(stock)
    same(dict(ours), dict(stock))
    batch = next(iter(given.values())).shape[0]
    assert seen == [batch // 2] * 2
    first, *others = given
    positional = model(given[first], return_dict=False, **{other: given[other] for other in others})
    same(positional, tuple(stock.values()))
    assert "2 calls so far" in notes(installed)
    installed.restore()
    assert torch.equal(tree_leaves(dict(model(**given)))[0], tree_leaves(dict(stock))[0])
    assert seen == [batch // 2] * 4 + [batch]


def test_what_a_capture_writes_to_the_same_memory_is_copied_in_time(unet):
    given = unet_inputs()
    stock = unet(**given)
    memory = torch.empty(1, 4, 8, 8, dtype=torch.float64)

    def replayed(_unet, inner, args, kwargs):
        return (memory.copy_(inner(*args, **kwargs)[0]),)

    forwards.surround(unet, replayed)
    sequential_guidance.install(unet)
    same(unet(**given, return_dict=False), tuple(stock.values()))


def wrap_a_block(unet):
    unet.mid_block.forward = partial(unet.mid_block.forward)


class OfTheUsersOwn(torch.nn.Conv2d):
    pass


WHOLE = {
    "an odd batch": (lambda _: None, unet_inputs(3), "a batch of 3 has no halves"),
    "an adapter": (
        lambda _: None,
        unet_inputs() | {"down_intrablock_additional_residuals": [values(2, 32, 8, 8)]},
        "its input down_intrablock_additional_residuals is not known",
    ),
    "an adapter in the older way": (
        lambda _: None,
        unet_inputs() | {"down_block_additional_residuals": [values(2, 32, 8, 8)]},
        "a T2I adapter",
    ),
    "one residual for all": (
        lambda _: None,
        unet_inputs() | residuals(batch=1),
        "its input down_block_additional_residuals is not known",
    ),
    "tensors for processors": (
        lambda _: None,
        unet_inputs() | {"cross_attention_kwargs": {"mystery": values(2, 3)}},
        "its input cross_attention_kwargs is not known",
    ),
    "a processor that cuts the batch": (
        lambda unet: (
            unet.mid_block.attentions[0].transformer_blocks[0].attn1.set_processor(PAGCFGIdentitySelfAttnProcessor2_0())
        ),
        unet_inputs(6),
        "its Attention is computed by PAGCFGIdentitySelfAttnProcessor2_0",
    ),
    "a hook": (
        lambda unet: unet.mid_block.register_forward_hook(lambda *_: None),
        unet_inputs(),
        "its UNetMidBlock2DCrossAttn has a hook",
    ),
    "a forward of the user's": (wrap_a_block, unet_inputs(), "has a forward that is not its class's own"),
    "a layer of the user's": (
        lambda unet: setattr(unet.conv_out, "__class__", OfTheUsersOwn),
        unet_inputs(),
        "its OfTheUsersOwn is of ",
    ),
    "training": (lambda unet: unet.train(), unet_inputs(), "the model is in training mode"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_might_need_the_whole_batch_gets_it(name, unet):
    change, given, reason = WHOLE[name]
    change(unet)
    stock = unet(**copy.deepcopy(given))
    installed = sequential_guidance.install(unet)
    ours = unet(**copy.deepcopy(given))
    assert torch.equal(ours.sample, stock.sample)
    assert "0 calls so far" in notes(installed)
    assert re.search(f"ran 1 calls whole, because .*{re.escape(reason)}", notes(installed))


def test_a_cache_that_remembers_the_last_call_gets_whole_batches():
    model, given = doubled(flux_transformer(guidance_embeds=True)), flux_inputs()
    installed = sequential_guidance.install(model)
    model.enable_cache(FirstBlockCacheConfig(threshold=0.5))
    with model.cache_context("cond"):
        model(**given)
    assert "has the hook fbc_" in notes(installed)
    model.disable_cache()
    model(**given)
    assert "1 calls so far" in notes(installed)


def test_errors_are_stocks_own(unet):
    sequential_guidance.install(unet)
    given = unet_inputs()
    with pytest.raises(TypeError, match="positional argument"):
        unet(*given.values(), *[None] * 20)
    with pytest.raises(TypeError, match="unexpected keyword"):
        unet(**given, mistake=1)


def test_a_model_of_another_kind_is_skipped_with_the_reason(unet):
    linear = torch.nn.Linear(2, 2)
    assert "Linear runs whole batches, because" in notes(sequential_guidance.install(linear))
    unet.forward = lambda *_, **__: None
    assert "its forward is not its class's own" in notes(sequential_guidance.install(unet))


def test_halves_with_sliced_attention_rules_and_a_lora(unet):
    given = unet_inputs()
    unet.set_attn_processor(SlicedAttnProcessor(1))
    unet.load_lora_adapter(lora_of(unet, "unet", ("to_q", "conv1"), seed=1), prefix="unet")
    unet.to(torch.float64)
    given["cross_attention_kwargs"] = {"scale": 0.5}
    stock = unet(**given)
    changes = apply(unet, RULES)
    installed = sequential_guidance.install(unet)
    same(unet(**given), stock)
    unscaled = unet(**unet_inputs()).sample
    assert (unscaled - stock.sample).abs().max() > 1e-3
    assert "2 calls so far" in notes(installed)
    installed.restore()
    undo(changes)
    assert torch.equal(unet(**given).sample, stock.sample)


@pytest.mark.parametrize("removed", ["never", "before restore", "after restore"])
@pytest.mark.parametrize("added", ["before", "after"])
def test_hooks_of_accelerate_compose_whenever_they_come_and_go(unet, added, removed):
    given = unet_inputs()
    stock = unet(**given)
    if added == "before":
        offload_hook(unet)
    installed = sequential_guidance.install(unet)
    if added == "after":
        offload_hook(unet)
    same(unet(**given), stock)
    assert "1 calls so far" in notes(installed)
    if removed == "before restore":
        remove_hook_from_module(unet)
        same(unet(**given), stock)
        assert "2 calls so far" in notes(installed)
    installed.restore()
    assert torch.equal(unet(**given).sample, stock.sample)
    if removed == "after restore":
        remove_hook_from_module(unet)
    assert hasattr(unet, "_hf_hook") == (removed == "never")
    forward = unet.__dict__.get("_old_forward" if removed == "never" else "forward")
    assert forward is None or forward.__func__ is UNet2DConditionModel.forward
    assert not [name for name in unet.__dict__ if name.startswith("_rocm_sd")]
    assert torch.equal(unet(**given).sample, stock.sample)


@pytest.mark.parametrize("when", ["before", "after"])
def test_group_offload_composes_and_a_second_install_works_over_what_is_left_of_the_first(unet, when):
    given = unet_inputs()
    stock = unet(**given)
    group = {"onload_device": CPU, "offload_device": CPU, "offload_type": "block_level", "num_blocks_per_group": 1}
    if when == "before":
        apply_group_offloading(unet, **group)
    first = sequential_guidance.install(unet)
    if when == "after":
        apply_group_offloading(unet, **group)
    same(unet(**given), stock)
    assert "1 calls so far" in notes(first)
    first.restore()
    assert torch.equal(unet(**given).sample, stock.sample)
    second = sequential_guidance.install(unet)
    same(unet(**given), stock)
    second.restore()
    assert torch.equal(unet(**given).sample, stock.sample)
    assert "1 calls so far" in notes(first)
    assert "1 calls so far" in notes(second)


def test_copies_run_their_own_weights_and_pickles_their_own_class(unet):
    given = unet_inputs()
    stock = unet(**given).sample
    sequential_guidance.install(unet)
    copied, pickled = copy.deepcopy(unet), pickle.loads(pickle.dumps(unet))
    with torch.no_grad():
        unet.conv_out.bias += 1
    same(copied(**given).sample, stock)
    assert torch.equal(pickled(**given).sample, stock)
    same(unet(**given).sample, stock + 1)
