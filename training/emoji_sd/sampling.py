"""Pictures from a model in training, and how many of them show what their prompts say."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rocm_sd.models.emoji import EMOJI, Prompt
from rocm_sd.quality.embedding import EmojiEmbedding, background_colour

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
    from transformers import CLIPTextModel, CLIPTokenizer

__all__ = ["sample", "score", "score_pairs"]


@torch.no_grad()
def sample(
    texts: list[str],
    tokenizer: CLIPTokenizer,
    text_encoder: CLIPTextModel,
    unet: UNet2DConditionModel,
    vae: AutoencoderKL,
    scheduler: DDIMScheduler,
    *,
    steps: int,
    guidance: float,
    seed: int,
) -> Tensor:
    """[N, 3, 128, 128] in 0..1: what StableDiffusionPipeline does, with live modules and in one batch."""
    device = unet.device
    everything = [*texts, *[""] * len(texts)]
    ids = tokenizer(everything, padding="max_length", truncation=True, return_tensors="pt")["input_ids"].to(device)
    hidden = text_encoder(ids).last_hidden_state
    # Drawn on the CPU, so that a seed means the same picture on every device.
    noise = torch.randn(len(texts), 4, 32, 32, generator=torch.Generator().manual_seed(seed))
    latents = noise.to(device, hidden.dtype)
    scheduler.set_timesteps(steps, device=device)
    for t in scheduler.timesteps:
        wanted, free = unet(torch.cat([latents, latents]), t, encoder_hidden_states=hidden).sample.chunk(2)
        latents = scheduler.step(free + guidance * (wanted - free), t, latents).prev_sample
    images = vae.decode(latents.to(vae.dtype) / vae.config.scaling_factor).sample
    return (images.float() / 2 + 0.5).clamp(0, 1)


def score(images: Tensor, prompts: list[Prompt], embedding: EmojiEmbedding) -> dict[str, list[bool]]:
    """For each picture of one object: is it retrieved first, is it among five, is the background right?"""
    found = torch.cat([embedding.retrieve(part, 5) for part in images.split(256)])
    wanted = torch.tensor([EMOJI[prompt.emoji[0]].look for prompt in prompts])
    right = found == wanted[:, None]
    colours = [background_colour(image) == prompt.colour for image, prompt in zip(images, prompts, strict=True)]
    return {"top1": right[:, 0].tolist(), "top5": right.any(1).tolist(), "colour": colours}


def score_pairs(images: Tensor, prompts: list[Prompt], embedding: EmojiEmbedding) -> dict[str, list[bool]]:
    """For each picture of two objects side by side: is each half's object among that half's five?"""
    height, width = images.shape[-2:]
    middle = slice(height // 4, height - height // 4)
    both = []
    for place, half in enumerate((slice(0, width // 2), slice(width // 2, width))):
        found = torch.cat([embedding.retrieve(part[:, :, middle, half], 5) for part in images.split(256)])
        wanted = torch.tensor([EMOJI[prompt.emoji[place]].look for prompt in prompts])
        both.append((found == wanted[:, None]).any(1))
    return {"left_top5": both[0].tolist(), "right_top5": both[1].tolist(), "both_top5": (both[0] & both[1]).tolist()}
