"""Stage 3: the autoencoder, 128x128x3 <-> 32x32x4, on composed pictures."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

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
    resumed,
    train,
)
from training.emoji_sd.scenes import LayerArrays, random_layers

__all__ = ["AutoencoderStep", "edge_loss", "latent_rms", "main"]

# Per latent value. Strong enough to keep latents near unit size and to tolerate a deviation of about 0.02, which is
# what a sampler leaves behind; the reconstruction pays less than 0.001 for it.
KL_WEIGHT = 5e-4
EDGE_WEIGHT = 0.5
SHARE_OF_PAIRS = 0.15


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
        images = composer.compose(*random_layers(seed + 1_000_003, step, 64, emoji, SHARE_OF_PAIRS)) * 2 - 1
        squares.append(vae.encode(images).latent_dist.mode().float().square().mean())
    return torch.stack(squares).mean().sqrt().item()


@torch.no_grad()
def psnr(vae: nn.Module, composer: Composer, emoji: np.ndarray, seed: int, grid: Path) -> float:
    """Mean over pictures from a seed that training never uses; the grid shows originals above reconstructions."""
    images = composer.compose(*random_layers(seed + 2_000_003, 0, 32, emoji, SHARE_OF_PAIRS))
    rebuilt = (vae.decode(vae.encode(images * 2 - 1).latent_dist.mode()).sample / 2 + 0.5).clamp(0, 1)
    save_grid(torch.stack([images.unflatten(0, (4, 8)), rebuilt.unflatten(0, (4, 8))], 1).flatten(0, 2), grid)
    return (-10 * (images - rebuilt).square().mean((1, 2, 3)).clamp_min(1e-10).log10()).mean().item()


class AutoencoderStage:
    def __init__(self, options: argparse.Namespace) -> None:
        self.device = device = pick_device(options.device)
        self.seed, self.batch_size = options.seed, options.batch
        torch.manual_seed(options.seed)
        self.composer = Composer(read_glyphs(options.glyphs), device)
        self.emoji = np.arange(len(self.composer.copies[0]))
        self.vae = autoencoder(options.preset).to(device, memory_format=torch.channels_last).train()
        self.optimizer = torch.optim.AdamW(
            self.vae.parameters(), lr=options.lr, betas=(0.9, 0.99), weight_decay=0.0, fused=device.type == "cuda"
        )
        self.forward: Any = AutoencoderStep(self.vae)

    def compile(self) -> None:
        images = torch.rand(self.batch_size, 3, 128, 128, device=self.device)
        images = images.contiguous(memory_format=torch.channels_last)
        noise = torch.randn(self.batch_size, 4, 32, 32, device=self.device)

        def trial(forward: Any) -> None:
            self.loss(forward, images, noise).backward()
            self.optimizer.zero_grad(set_to_none=True)

        self.forward = compiled_or_plain(self.forward, trial)

    def make(self, step: int) -> tuple[np.ndarray, list[LayerArrays]]:
        return random_layers(self.seed, step, self.batch_size, self.emoji, SHARE_OF_PAIRS)

    def loss(self, forward: Any, images: Tensor, noise: Tensor) -> Tensor:
        with autocast(self.device):
            rebuilt, mean, log_variance = (value.float() for value in forward(images, noise))
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        edges = edge_loss(rebuilt, images)
        return l1_loss(rebuilt, images) + mse_loss(rebuilt, images) + EDGE_WEIGHT * edges + KL_WEIGHT * kl

    def step(self, step: int, made: tuple[np.ndarray, list[LayerArrays]], lr: float) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(self.seed * 1_000_003 + step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        images = (self.composer.compose(*made) * 2 - 1).contiguous(memory_format=torch.channels_last)
        noise = torch.randn(self.batch_size, 4, 32, 32, device=self.device, generator=generator)
        loss = self.loss(self.forward, images, noise)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.vae.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def state(self) -> dict[str, Any]:
        return {"model": self.vae.state_dict(), "optimizer": self.optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self.vae.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m training.emoji_sd.train_autoencoder", description=__doc__)
    add_common_options(parser, minutes=4, batch=128, lr=1e-3)
    parser.add_argument("--glyphs", type=Path, default=GLYPHS_FILE)
    parser.add_argument("--preset", choices=list(PRESETS), default="full")
    options = parser.parse_args(arguments)
    budget = Budget(options.minutes, options.steps)
    run = Run("autoencoder", options)
    stage = AutoencoderStage(options)
    first, spent = resumed(stage, run)
    budget.add(spent)
    if options.compile:
        stage.compile()
    step = train(stage, run, options, budget, first)
    if budget.fraction(step) < 1:
        return
    vae, composer, emoji = stage.vae.eval(), stage.composer, stage.emoji
    rms = latent_rms(vae, composer, emoji, options.seed, batches=16 if stage.device.type == "cuda" else 1)
    vae.register_to_config(scaling_factor=1 / rms)
    decibels = psnr(vae, composer, emoji, options.seed, options.out / "autoencoder.png")
    vae.save_pretrained(options.out / "vae")
    run.log(step=step, minutes=budget.elapsed / 60, psnr=decibels, scaling_factor=1 / rms)


if __name__ == "__main__":
    main()
