"""Levels: what is decided from free memory, what is done about it, and that no picture changes by it."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from accelerate import cpu_offload
from diffusers import (
    MultiControlNetModel,
    SD3Transformer2DModel,
    StableDiffusionControlNetPipeline,
    UNet2DConditionModel,
)

from live_memory import live_peak
from model_inputs import doubled, notes, offload_hook, same, unet_inputs
from pipelines import tiny_pipeline
from rocm_sd import numerics
from rocm_sd.engine.levels import decision as levels
from rocm_sd.engine.levels import sequential_guidance
from rocm_sd.errors import InvalidOption
from rocm_sd.rewrite import RULES, apply, undo
from tiny_models import controlnet_of, unet_of

CPU = torch.device("cpu")
GPU = torch.device("cuda:0")


@pytest.fixture
def unet():
    torch.manual_seed(0)
    return doubled(unet_of("sd15"))


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
    text = notes(installed)
    assert text.startswith("level memory was asked for")
    assert "each part of the pipeline is on cpu only while it works" in text
    assert "6 calls so far" in text
    assert "whole" not in text
    installed.restore()
    assert state(pipe) == before
    assert torch.equal(latents(pipe), stock)


def test_the_index_of_an_earlier_offload_is_no_longer_meant_but_comes_back(pipe):
    pipe._offload_gpu_id = 1
    installed = levels.install(pipe, replace(levels.decide(pipe, "memory"), offload=True))
    assert pipe._offload_device == torch.device("cpu:0")
    installed.restore()
    assert pipe._offload_gpu_id == 1


def test_parts_that_cannot_be_moved_stay_and_the_reason_is_reported(pipe):
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
