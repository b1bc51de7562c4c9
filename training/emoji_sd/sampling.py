"""Pictures from a model in training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
    from torch import Tensor
    from transformers import CLIPTextModel, CLIPTokenizer

__all__ = ["sample"]


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
