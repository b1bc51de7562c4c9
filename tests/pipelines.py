"""A Stable Diffusion 1.5 pipeline of the real block types with random weights, a step of which takes milliseconds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

if TYPE_CHECKING:
    from pathlib import Path

SPECIAL = ("<|startoftext|>", "<|endoftext|>")


def tiny_unet(**options) -> UNet2DConditionModel:
    config = {
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "cross_attention_dim": 32,
        "attention_head_dim": 4,
        "norm_num_groups": 16,
    }
    return UNet2DConditionModel(**config | options)


def tiny_vae() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        block_out_channels=(32, 32),
        latent_channels=4,
        norm_num_groups=16,
    )


def tiny_tokenizer(folder: Path) -> CLIPTokenizer:
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    vocabulary = {token: number for number, token in enumerate([*letters, *(f"{c}</w>" for c in letters), *SPECIAL])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16)


def tiny_pipeline(folder: Path, seed: int = 0) -> StableDiffusionPipeline:
    torch.manual_seed(seed)
    tokenizer = tiny_tokenizer(folder)
    text = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    pipe = StableDiffusionPipeline(
        vae=tiny_vae().eval(),
        text_encoder=CLIPTextModel(text).eval(),
        tokenizer=tokenizer,
        unet=tiny_unet().eval(),
        scheduler=DDIMScheduler(
            beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, clip_sample=False, steps_offset=1
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe
