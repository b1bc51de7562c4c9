"""Upscalers: the four-times one, whose UNet sees the small picture and its noise level, and the one of latents.

The latter's UNet has blocks of k-diffusion, which no rule is for: what is not known runs as stock does.
"""

from __future__ import annotations

import diffusers
import pytest
import torch

import rocm_sd
from pipelines import BETAS, Case, Twins, picture_of, small_blocks_too
from tiny_models import TEXT, text_encoder_of, unet_of, vae_of


def four_times(tokenizer):
    return {
        "vae": vae_of(),
        "text_encoder": text_encoder_of(tokenizer),
        "tokenizer": tokenizer,
        # Latents beside the small picture; a class is a level of noise.
        "unet": unet_of("sd21", in_channels=7, num_class_embeds=1000),
        "low_res_scheduler": diffusers.DDPMScheduler(**BETAS),
        "max_noise_level": 350,
    }


def of_latents(tokenizer):
    config = {
        "block_out_channels": (32, 32, 64, 64),
        "down_block_types": ("KDownBlock2D", *["KCrossAttnDownBlock2D"] * 3),
        "up_block_types": (*["KCrossAttnUpBlock2D"] * 3, "KUpBlock2D"),
        "mid_block_type": None,
        "attention_head_dim": 8,
        "norm_num_groups": None,
        "act_fn": "gelu",
        "timestep_post_act": "gelu",
        "time_embedding_type": "fourier",
        # 128 numbers for the level of noise, and the pooled text.
        "time_cond_proj_dim": 128 + TEXT,
        "resnet_time_scale_shift": "scale_shift",
        "conv_in_kernel": 1,
        "conv_out_kernel": 1,
        "in_channels": 8,
        "out_channels": 5,
    }
    return {
        "vae": vae_of(),
        "text_encoder": text_encoder_of(tokenizer),
        "tokenizer": tokenizer,
        "unet": unet_of("sd15", **config),
    }


_CALL = {"prompt": "a frog", "num_inference_steps": 3, "image": picture_of(1)}
UPSCALERS = {
    "four-times": Case("StableDiffusionUpscalePipeline", four_times, _CALL | {"noise_level": 30}),
    "of-latents": Case("StableDiffusionLatentUpscalePipeline", of_latents, _CALL, "euler"),
}


@pytest.fixture(autouse=True, params=["0", "1"], ids=["stepwise", "captured"])
def step_graph(request, monkeypatch):
    small_blocks_too(monkeypatch, request.param)
    return request.param


@pytest.fixture(params=UPSCALERS)
def case(request):
    return UPSCALERS[request.param]


def test_latents_are_stocks_and_restore_brings_its_bits_back(case, tmp_path, step_graph):
    twins = Twins(case, tmp_path)
    for seed in (0, 1):
        twins.check(seed)
    report = rocm_sd.report(twins.ours)
    kind = type(twins.ours.unet).__name__
    assert any(note.startswith(kind) and "of its forward" in note for note in report.notes) == (step_graph == "1")
    rocm_sd.restore(twins.ours)
    assert twins.are_equal(2)


def test_what_is_replaced_and_what_is_left_is_named(tmp_path):
    known = rocm_sd.report(rocm_sd.optimize(UPSCALERS["four-times"].build(tmp_path)))
    assert {change.path.split(".")[0] for change in known.replaced} >= {"unet", "vae"}
    other = rocm_sd.report(rocm_sd.optimize(UPSCALERS["of-latents"].build(tmp_path)))
    assert "vae" in {change.path.split(".")[0] for change in other.replaced}


@pytest.mark.parametrize("options", [{"guidance_scale": 1.0}, {"negative_prompt": "a dog"}], ids=",".join)
def test_options_of_a_call(case, tmp_path, options):
    Twins(case, tmp_path).check(**options)


def test_the_picture_is_stocks_too(case, tmp_path):
    """From pixels to pixels: four times as large a side in the one, twice in the other, by their VAEs."""
    twins = Twins(case, tmp_path)
    ours, stock = (twins.drawn(pipe, output_type="pt").float() for pipe in (twins.ours, twins.stock))
    assert ours.shape == stock.shape
    assert ours.shape[-1] > picture_of(1).shape[-1]
    assert torch.allclose(ours, stock, atol=2e-3)


def test_the_level_of_noise_counts(tmp_path):
    """It comes as class labels: a graph that forgot them would give the same latents for every level."""
    case = UPSCALERS["four-times"]
    twins = Twins(case, tmp_path)
    first = twins.check(noise_level=5)
    assert not torch.allclose(first, twins.check(noise_level=300), atol=1e-3)
    assert torch.equal(first, twins.drawn(twins.ours, noise_level=5))


def test_a_batch_of_pictures(case, tmp_path):
    Twins(case, tmp_path).check(prompt=["a frog", "a dog"], image=picture_of(3, batch=2))
