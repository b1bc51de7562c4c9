"""Stage 3: the autoencoder, 128x128x3 <-> 32x32x4, on composed pictures."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, l1_loss, mse_loss
from training.emoji_sd.architecture import PRESETS, autoencoder
from training.emoji_sd.compose import Composer
from training.emoji_sd.glyphs import GLYPHS_FILE, read_glyphs
from training.emoji_sd.grids import save_grid
from training.emoji_sd.loop import (
    Budget,
    Run,
    add_common_options,
    autocast,
    compiled_or_plain,
    pick_device,
    prefetched,
)
from training.emoji_sd.scenes import random_layers

__all__ = ["AutoencoderStep", "edge_loss", "latent_rms", "main"]

# Per latent value. Strong enough to keep latents near unit size and to tolerate a deviation of about 0.02, which is
# what a sampler leaves behind; the reconstruction pays less than 0.001 for it.
KL_WEIGHT = 5e-4
EDGE_WEIGHT = 0.5


class AutoencoderStep(nn.Module):
    """(images in -1..1, noise) -> (reconstruction, mean, log variance); the noise is passed in to be repeatable."""

    def __init__(self, vae: nn.Module) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.vae.quant_conv(self.vae.encoder(images)).chunk(2, dim=1)
        log_variance = log_variance.clamp(-30, 20)
        latents = mean + (0.5 * log_variance).exp() * noise
        return self.vae.decoder(self.vae.post_quant_conv(latents)), mean, log_variance


def edge_loss(a: Tensor, b: Tensor) -> Tensor:
    """Mean absolute difference of horizontal and vertical gradients, at full and half size: punishes blur."""
    total = a.new_zeros(())
    for _ in range(2):
        total = total + l1_loss(a.diff(dim=-1), b.diff(dim=-1)) + l1_loss(a.diff(dim=-2), b.diff(dim=-2))
        a, b = avg_pool2d(a, 2), avg_pool2d(b, 2)
    return total


@torch.no_grad()
def latent_rms(vae: nn.Module, composer: Composer, emoji: np.ndarray, seed: int, batches: int) -> float:
    """Root mean square of latents. SD's pipeline scales but never shifts them, so the mean counts as signal."""
    squares = []
    for step in range(batches):
        images = composer.compose(*random_layers(seed + 1_000_003, step, 64, emoji, 0.15)) * 2 - 1
        squares.append(vae.encode(images).latent_dist.mode().float().square().mean())
    return torch.stack(squares).mean().sqrt().item()


@torch.no_grad()
def psnr(vae: nn.Module, composer: Composer, emoji: np.ndarray, seed: int, grid: Path) -> float:
    """Mean over pictures from a seed that training never uses; the grid shows originals above reconstructions."""
    images = composer.compose(*random_layers(seed + 2_000_003, 0, 64, emoji, 0.15))
    rebuilt = (vae.decode(vae.encode(images * 2 - 1).latent_dist.mode()).sample / 2 + 0.5).clamp(0, 1)
    save_grid(torch.stack([images[:32].unflatten(0, (4, 8)), rebuilt[:32].unflatten(0, (4, 8))], 1).flatten(0, 2), grid)
    return (-10 * (images - rebuilt).square().mean((1, 2, 3)).clamp_min(1e-10).log10()).mean().item()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m training.emoji_sd.train_autoencoder", description=__doc__)
    add_common_options(parser, minutes=4, batch=128, lr=1e-3)
    parser.add_argument("--glyphs", type=Path, default=GLYPHS_FILE)
    parser.add_argument("--preset", choices=list(PRESETS), default="full")
    parser.add_argument("--log-every", type=int, default=100)
    options = parser.parse_args(arguments)
    device = pick_device(options.device)
    torch.manual_seed(options.seed)
    run = Run("autoencoder", options)
    composer = Composer(read_glyphs(options.glyphs), device)
    emoji = np.arange(len(composer.copies[0]))
    vae = autoencoder(options.preset).to(device, memory_format=torch.channels_last).train()
    optimizer = torch.optim.AdamW(
        vae.parameters(), lr=options.lr, betas=(0.9, 0.99), weight_decay=0.0, fused=device.type == "cuda"
    )
    state = run.load()
    if state:
        vae.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    budget = Budget(options.minutes, options.steps, state["elapsed"] if state else 0.0)
    step = state["step"] if state else 0

    def save() -> None:
        run.save(
            {"model": vae.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "elapsed": budget.elapsed}
        )

    def make(number: int) -> tuple:
        return random_layers(options.seed, number, options.batch, emoji, 0.15)

    def losses(forward: nn.Module, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        with autocast(device):
            rebuilt, mean, log_variance = forward(images, noise)
        rebuilt, mean, log_variance = rebuilt.float(), mean.float(), log_variance.float()
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        difference = l1_loss(rebuilt, images)
        whole = difference + mse_loss(rebuilt, images) + EDGE_WEIGHT * edge_loss(rebuilt, images) + KL_WEIGHT * kl
        return whole, difference

    def trial(forward: nn.Module) -> None:
        shape = (options.batch, 3, 128, 128)
        images = torch.rand(shape, device=device).contiguous(memory_format=torch.channels_last)
        losses(forward, images, torch.randn(options.batch, 4, 32, 32, device=device))[0].backward()
        optimizer.zero_grad(set_to_none=True)

    forward = compiled_or_plain(AutoencoderStep(vae), trial, wanted=options.compile)
    for step, scenes in prefetched(make, step):
        if budget.fraction(step) >= 1 or run.must_stop:
            break
        generator = torch.Generator(device).manual_seed(options.seed * 1_000_003 + step)
        for group in optimizer.param_groups:
            group["lr"] = options.lr * budget.lr_factor(step, options.warmup)
        images = (composer.compose(*scenes) * 2 - 1).contiguous(memory_format=torch.channels_last)
        noise = torch.randn(options.batch, 4, 32, 32, device=device, generator=generator)
        loss, difference = losses(forward, images, noise)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        if step % options.log_every == 0:
            run.log(step=step, minutes=budget.elapsed / 60, loss=loss.item(), l1=difference.item())
        if run.save_is_due:
            save()
    save()
    if budget.fraction(step) < 1:
        print("autoencoder: stopped early; the same command resumes")
        return
    vae.eval()
    rms = latent_rms(vae, composer, emoji, options.seed, batches=16 if device.type == "cuda" else 1)
    vae.register_to_config(scaling_factor=1 / rms)
    decibels = psnr(vae, composer, emoji, options.seed, options.out / "autoencoder.png")
    vae.save_pretrained(options.out / "vae")
    run.log(step=step, minutes=budget.elapsed / 60, psnr=decibels, scaling_factor=1 / rms)


if __name__ == "__main__":
    main()
