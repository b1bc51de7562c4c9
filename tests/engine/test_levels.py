"""Levels: what is decided from free memory, what is done about it, and that no picture changes by it."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from accelerate import cpu_offload
from accelerate.hooks import CpuOffload, add_hook_to_module, remove_hook_from_module
from diffusers import (
    FirstBlockCacheConfig,
    MultiControlNetModel,
    SD3Transformer2DModel,
    StableDiffusionControlNetPipeline,
    UNet2DConditionModel,
)
from diffusers.hooks import apply_group_offloading
from diffusers.models.attention_processor import PAGCFGIdentitySelfAttnProcessor2_0, SlicedAttnProcessor
from torch.utils._pytree import tree_leaves

from live_memory import live_peak
from pipelines import tiny_pipeline
from rocm_sd.engine import levels, sequential_guidance
from rocm_sd.errors import InvalidOption
from rocm_sd.rewrite import RULES, apply, undo
from rocm_sd.verify import numerics
from tiny_models import POOLED, TEXT, controlnet_of, flux_transformer, lora_of, sd3_transformer, unet_of

CPU = torch.device("cpu")
GPU = torch.device("cuda:0")


def values(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def unet_inputs(batch=2, text=TEXT):
    return {"sample": values(batch, 4, 8, 8), "timestep": 7, "encoder_hidden_states": values(batch, 5, text)}


def sdxl_inputs(batch=4):
    added = {"text_embeds": values(batch, POOLED), "time_ids": values(batch, 6)}
    times = torch.arange(batch)
    return unet_inputs(batch, 2 * TEXT) | {"added_cond_kwargs": added, "timestep": times}


def residuals(batch=2):
    """Of the shapes that a ControlNet adds to the small UNet, and different for every sample."""
    shapes = [(32, 8), (32, 8), (32, 4), (64, 4)]
    down = [values(batch, channels, side, side) for channels, side in shapes]
    return {"down_block_additional_residuals": down, "mid_block_additional_residual": values(batch, 64, 4, 4)}


def control_inputs(batch=2):
    return unet_inputs(batch) | {"controlnet_cond": values(batch, 3, 16, 16), "conditioning_scale": 0.7}


def sd3_inputs(batch=2):
    return {
        "hidden_states": values(batch, 4, 16, 16),
        "encoder_hidden_states": values(batch, 5, 2 * TEXT),
        "pooled_projections": values(batch, 2 * POOLED),
        "timestep": torch.full((batch,), 300.0, dtype=torch.float64),
        "block_controlnet_hidden_states": [values(batch, 64, 32)],
    }


def flux_inputs(batch=2):
    return {
        "hidden_states": values(batch, 16, 16),
        "encoder_hidden_states": values(batch, 5, TEXT),
        "pooled_projections": values(batch, POOLED),
        "timestep": torch.full((batch,), 0.3, dtype=torch.float64),
        "guidance": torch.linspace(1, 4, batch, dtype=torch.float64),
        "img_ids": values(16, 3),
        "txt_ids": values(5, 3),
        "joint_attention_kwargs": {},
    }


def doubled(model):
    return model.to(torch.float64).requires_grad_(requires_grad=False)


@pytest.fixture
def unet():
    torch.manual_seed(0)
    return doubled(unet_of("sd15"))


def notes(installed):
    return " | ".join(installed.notes())


def same(ours, stock):
    """Equal but for the order of sums; other samples' values would differ in the first digits."""
    ours, stock = tree_leaves(ours), tree_leaves(stock)
    assert len(ours) == len(stock)
    for mine, theirs in zip(ours, stock, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


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

    def whole(*args, **kwargs):
        seen.append((args[0] if args else kwargs[next(iter(given))]).shape[0])
        return type(model).forward(model, *args, **kwargs)

    installed = sequential_guidance.install(model, whole)
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
    assert seen == [batch // 2] * 4


def test_what_a_capture_writes_to_the_same_memory_is_copied_in_time(unet):
    given = unet_inputs()
    stock = unet(**given)
    memory = torch.empty(1, 4, 8, 8, dtype=torch.float64)

    def replayed(**kwargs):
        return (memory.copy_(UNet2DConditionModel.forward(unet, **kwargs)[0]),)

    sequential_guidance.install(unet, replayed)
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


def test_a_model_of_another_kind_is_left_alone_with_the_reason(unet):
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


def offload_hook(model, device=CPU):
    add_hook_to_module(model, CpuOffload(execution_device=device), append=True)


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


def live_bytes(model, monkeypatch, *inputs):
    # On the meta device torch would write the matrix of scores, which no fused attention does.
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda query, *_, **__: torch.empty_like(query))
    with torch.no_grad():
        return live_peak(lambda: model(*inputs), *model.parameters(), *model.buffers())


def real_unet(family):
    """The shapes of the real model, without memory behind them."""
    configs = {
        "sd15": {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8},
        "sdxl": {
            "sample_size": 128,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            "block_out_channels": (320, 640, 1280),
            # SDXL has 10 of the last, one after the other: they take time, but no more memory.
            "transformer_layers_per_block": (1, 2, 1),
            "attention_head_dim": (5, 10, 20),
            "cross_attention_dim": 2048,
            "use_linear_projection": True,
        },
    }
    with torch.device("meta"):
        return UNet2DConditionModel(**configs[family]).eval().half()


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_activations_of_real_unets_are_estimated_within_a_tenth_and_halves_need_half(family, monkeypatch):
    unet = real_unet(family)
    side = unet.config.sample_size
    with torch.device("meta"):
        inputs = (
            torch.empty(2, 4, side, side, dtype=torch.float16),
            torch.empty(2, dtype=torch.int64),
            torch.empty(2, 77, unet.config.cross_attention_dim, dtype=torch.float16),
        )
    counted = live_bytes(unet, monkeypatch, *inputs)
    assert 0.95 < levels.estimate_activations(unet, (side, side), samples=2) / counted < 1.1
    sequential_guidance.install(unet)
    assert live_bytes(unet, monkeypatch, *inputs) < 0.52 * counted


def test_activations_of_a_transformer_are_estimated_too(monkeypatch):
    with torch.device("meta"):
        model = SD3Transformer2DModel(sample_size=128, num_layers=2, pos_embed_max_size=192).eval().half()
        inputs = [torch.empty(2, *shape).half() for shape in ((16, 128, 128), (333, 4096), (2048,), ())]
    counted = live_bytes(model, monkeypatch, *inputs)
    assert 0.9 < levels.estimate_activations(model, (128, 128), samples=2) / counted < 1.15


@pytest.fixture
def pipe(tmp_path):
    return tiny_pipeline(tmp_path)


def latents(pipe, **options):
    arguments = {"num_inference_steps": 3, "height": 16, "width": 16, "output_type": "latent"}
    return pipe("a frog", generator=torch.Generator().manual_seed(0), **arguments | options).images


def require_same_picture(ours, stock, tmp_path):
    exact = latents(tiny_pipeline(tmp_path).to(torch.float64))
    numerics.require("latents", ours, exact, stock)


def on_a_gpu(monkeypatch):
    """As if the pipeline lay on a GPU: whatever is decided, nothing is moved."""
    monkeypatch.setattr(levels, "placement", lambda _: levels.Placement(GPU))


def test_auto_goes_from_performance_to_memory_as_memory_gets_short(pipe, monkeypatch):
    on_a_gpu(monkeypatch)
    ample = levels.decide(pipe, "auto", free=2**40)
    weights = sum(p.numel() * 4 for part in (pipe.unet, pipe.vae, pipe.text_encoder) for p in part.parameters())
    assert sum(ample.sizes.values()) >= weights
    assert set(ample.sizes) == {"unet", "vae", "text_encoder"}
    assert (ample.level, ample.graphs, ample.offload, ample.sequential_guidance) == ("performance", True, False, False)
    needed = sum(ample.sizes.values()) + ample.activations + levels._MARGIN
    assert levels.decide(pipe, "auto", free=needed).level == "performance"
    halves = levels.decide(pipe, "auto", free=needed - 1)
    assert (halves.level, halves.graphs, halves.offload, halves.sequential_guidance) == ("memory", False, False, True)
    parts = levels.decide(pipe, "auto", free=needed - ample.activations // 2 - 1)
    assert (parts.level, parts.graphs, parts.offload, parts.sequential_guidance) == ("memory", False, True, True)
    assert parts.why == (
        "level auto is memory here: it needs 0.54 GB more on cuda:0 (0.00 GB of its 0.00 GB of weights that are not "
        "there yet, an estimated 0.00 GB of activations for one picture of 16x16 with guidance, 0.54 GB to spare), and "
        f"{(needed - ample.activations // 2 - 1) / 1e9:.2f} GB are free; so the halves of a batch run one after the "
        "other and parts of the pipeline are moved in and out"
    )


def test_weights_that_lie_on_the_device_are_not_counted_again(pipe):
    decision = levels.decide(pipe, "auto", free=10**9)
    assert decision.level == "performance"
    assert not decision.graphs
    assert decision.device == CPU
    assert "0.00 GB of its" in decision.why
    assert "1.00 GB are free" in decision.why
    assert levels.decide(pipe, "auto", free=2**29 + decision.activations).level == "performance"
    short = levels.decide(pipe, "auto", free=2**29 + decision.activations - 1)
    assert (short.level, short.sequential_guidance, short.offload) == ("memory", True, False)


@pytest.mark.parametrize("level", ["performance", "memory"])
def test_a_level_that_is_asked_for_is_not_overruled(pipe, level, monkeypatch):
    on_a_gpu(monkeypatch)
    for free in (0, 2**40):
        decision = levels.decide(pipe, level, free=free)
        assert decision.level == level
        assert decision.offload == (level == "memory")
        assert decision.graphs == (level == "performance")
    assert "level memory may be wanted" in levels.decide(pipe, "performance", free=0).why
    with pytest.raises(InvalidOption, match="Use one of: auto"):
        levels.decide(pipe, "fast")


def test_a_bare_model_has_levels_too(unet, monkeypatch):
    on_a_gpu(monkeypatch)
    decision = levels.decide(unet, "memory", free=0)
    assert (decision.sequential_guidance, decision.offload) == (True, False)
    stock = unet(**unet_inputs())
    installed = levels.install(unet, decision)
    same(unet(**unet_inputs()), stock)
    assert "1 calls so far" in notes(installed)
    assert levels.decide(torch.nn.Linear(2, 2), "auto", free=2**40).activations is None


def test_free_memory_of_a_cpu_is_what_the_system_says():
    free = levels.free_memory(CPU)
    assert free is None or 2**20 < free < 2**50
    assert levels.free_memory(torch.device("meta")) is None


def test_every_controlnet_of_several_runs_halves(pipe):
    control = MultiControlNetModel([controlnet_of("sd15"), controlnet_of("sd15")])
    pipe = StableDiffusionControlNetPipeline(**pipe.components, controlnet=control, requires_safety_checker=False)
    installed = levels.install(pipe, levels.decide(pipe, "memory"))
    assert notes(installed).count("ControlNetModel runs the two halves") == 2


def state(pipe):
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    return {
        "pipe": {name: value for name, value in pipe.__dict__.items() if "hook" in name or "offload" in name},
        "parts": {name: sorted(part.__dict__) for name, part in parts.items()},
    }


def test_parts_are_moved_by_diffusers_own_hooks_and_restore_takes_them_off(pipe, tmp_path):
    stock, before = latents(pipe), state(pipe)
    decision = replace(levels.decide(pipe, "memory"), offload=True)
    installed = levels.install(pipe, decision)
    # In the order in which a picture needs them: each one's hook sends the one before it out.
    assert [hook.model for hook in pipe._all_hooks] == [pipe.text_encoder, pipe.unet, pipe.vae]
    assert pipe.unet._hf_hook.prev_module_hook.model is pipe.text_encoder
    require_same_picture(latents(pipe), stock, tmp_path)
    # Diffusers has put all hooks on anew by now.
    require_same_picture(latents(pipe), stock, tmp_path)
    told = notes(installed)
    assert told.startswith("level memory was asked for")
    assert "each part of the pipeline is on cpu only while it works" in told
    assert "6 calls so far" in told
    assert "whole" not in told
    installed.restore()
    assert state(pipe) == before
    assert torch.equal(latents(pipe), stock)


def test_the_index_of_an_earlier_offload_is_no_longer_meant_but_comes_back(pipe):
    pipe._offload_gpu_id = 1
    installed = levels.install(pipe, replace(levels.decide(pipe, "memory"), offload=True))
    assert pipe._offload_device == torch.device("cpu:0")
    installed.restore()
    assert pipe._offload_gpu_id == 1


def test_parts_that_cannot_be_moved_stay_and_the_reason_is_told(pipe):
    stock = latents(pipe)
    pipe.model_cpu_offload_seq = None
    before = state(pipe)
    installed = levels.install(pipe, replace(levels.decide(pipe, "performance"), offload=True))
    assert "all parts stay on cpu, because they cannot be moved: Model CPU offload cannot be enabled" in notes(
        installed
    )
    assert state(pipe) == before
    assert torch.equal(latents(pipe), stock)
    installed.restore()


def test_offloading_that_the_user_has_changed_since_is_left_to_the_user(pipe):
    installed = levels.install(pipe, replace(levels.decide(pipe, "memory"), offload=True))
    pipe.enable_sequential_cpu_offload(device="cpu")
    installed.restore()
    assert levels.placement(pipe).by == "sequential offload"


OFFLOADS = {
    "model offload": lambda pipe: pipe.enable_model_cpu_offload(device="cpu"),
    # What the pipeline's own method does; that one would say cpu:0, which accelerate takes for another device than cpu.
    "sequential offload": lambda pipe: [cpu_offload(part, CPU) for part in (pipe.text_encoder, pipe.unet, pipe.vae)],
    "group offload": lambda pipe: pipe.enable_group_offload(CPU, CPU, "block_level", num_blocks_per_group=1),
}


@pytest.mark.parametrize("kind", OFFLOADS)
def test_offloading_of_the_users_own_is_kept(pipe, kind, tmp_path):
    stock = latents(pipe)
    OFFLOADS[kind](pipe)
    assert levels.placement(pipe).by == kind
    assert levels.placement(pipe).device.type == "cpu"
    auto = levels.decide(pipe, "auto", free=0)
    assert (auto.level, auto.kept, auto.offload, auto.sequential_guidance) == ("performance", kind, False, False)
    assert auto.why == (
        f"level auto is performance here: the {kind} that was found is kept, so weights move and no graph is captured"
    )
    decision = levels.decide(pipe, "memory", free=0)
    assert (decision.offload, decision.sequential_guidance) == (False, True)
    installed = levels.install(pipe, decision)
    require_same_picture(latents(pipe), stock, tmp_path)
    assert "3 calls so far" in notes(installed)
    assert f"the {kind} that was found is kept" in notes(installed)
    installed.restore()
    assert levels.placement(pipe).by == kind
    assert torch.equal(latents(pipe), stock)


@pytest.mark.parametrize("kind", OFFLOADS)
def test_offloading_that_comes_later_works_with_halves_and_rules(pipe, kind, tmp_path):
    stock = latents(pipe)
    changes = [change for part in (pipe.unet, pipe.vae) for change in apply(part, RULES)]
    installed = levels.install(pipe, levels.decide(pipe, "memory"))
    OFFLOADS[kind](pipe)
    require_same_picture(latents(pipe), stock, tmp_path)
    assert "3 calls so far" in notes(installed)
    installed.restore()
    undo(changes)
    assert levels.placement(pipe).by == kind
    assert torch.equal(latents(pipe), stock)


def test_the_device_of_offloaded_weights_is_where_they_compute(unet):
    offload_hook(unet, GPU)
    assert levels.placement(unet) == levels.Placement(GPU, "model offload")
    decision = levels.decide(unet, "performance", free=2**40)
    assert (decision.device, decision.graphs) == (GPU, False)


def test_a_pipeline_with_a_level_can_be_collected(pipe, tmp_path):
    pipe = tiny_pipeline(tmp_path)
    installed = levels.install(pipe, replace(levels.decide(pipe, "memory"), offload=True))
    gone = weakref.ref(pipe), weakref.ref(pipe.unet)
    del pipe
    gc.collect()
    assert gone[0]() is None
    installed.restore()


@pytest.mark.gpu
def test_on_a_gpu_parts_move_and_come_back(pipe, device, monkeypatch):
    # One half of the guidance after the other rounds in another order, and convolutions would keep 10 bits.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    pipe.to(device)
    stock = latents(pipe)
    decision = levels.decide(pipe, "memory")
    assert decision.offload
    installed = levels.install(pipe, decision)
    assert pipe.unet.device.type == "cpu"
    torch.testing.assert_close(latents(pipe), stock, rtol=1e-3, atol=1e-3)
    installed.restore()
    assert pipe.unet.device.type == "cuda"
    assert torch.equal(latents(pipe), stock)
