"""Stage 4: text encoder and UNet together, as a latent diffusion model with v-prediction."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch import Tensor, nn
from training.emoji_sd.architecture import PRESETS, autoencoder, noise_schedule, text_encoder, unet
from training.emoji_sd.compose import Composer
from training.emoji_sd.glyphs import CACHE, GLYPHS_FILE, read_glyphs
from training.emoji_sd.grids import save_grid
from training.emoji_sd.loop import (
    Averages,
    Budget,
    Run,
    add_common_options,
    autocast,
    compiled_or_plain,
    pick_device,
    resumed,
    train,
)
from training.emoji_sd.sampling import sample
from training.emoji_sd.scenes import SceneSampler, arrays_of
from training.emoji_sd.tokenizer import PhraseTokens
from transformers import CLIPTextModel, CLIPTokenizer

from rocm_sd.errors import ModelNotFound
from rocm_sd.models.emoji import Prompt, held_out_prompts, trained_prompts
from rocm_sd.quality.embedding import load_embedding
from rocm_sd.quality.prompt_match import match

__all__ = ["UNetStage", "loss_weights", "main"]

MIN_SNR_GAMMA = 5.0
CAPTION_DROP = 0.1
# The text encoder starts from nothing as the UNet does, but its token table sees each rare word seldom.
TEXT_LR_FACTOR = 0.5


def loss_weights(alphas: Tensor) -> Tensor:
    """w(t) = min(SNR + 1, gamma + 1) / (SNR + 1) on the v error.

    Min-SNR's own min(SNR, gamma) / (SNR + 1) vanishes where nearly all is noise, and there the model must learn to
    place object and background from the words alone; so the clamp is kept and that part of the weight is not.
    """
    snr = alphas / (1 - alphas)
    return (snr + 1).clamp(max=MIN_SNR_GAMMA + 1) / (snr + 1)


class UNetStage:
    """Models, optimiser, averages and the training step; knows nothing of time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = device = pick_device(options.device)
        self.seed, self.batch_size = options.seed, options.batch
        torch.manual_seed(options.seed)
        self.tokenizer = CLIPTokenizer.from_pretrained(options.tokenizer)
        self.phrase_tokens = PhraseTokens(self.tokenizer)
        self.vae = self._autoencoder(options)
        if options.init:
            self.text = CLIPTextModel.from_pretrained(options.init / "text_encoder", dtype=torch.float32)
            self.unet = UNet2DConditionModel.from_pretrained(options.init / "unet", torch_dtype=torch.float32)
        else:
            self.text, self.unet = text_encoder(options.preset, self.tokenizer), unet(options.preset)
        self.text.to(device).train()
        self.unet.to(device, memory_format=torch.channels_last).train()
        self.scheduler = noise_schedule()
        self.alphas = self.scheduler.alphas_cumprod.to(device)
        self.weights = loss_weights(self.alphas)
        self.composer = Composer(read_glyphs(options.glyphs), device)
        self.sampler = SceneSampler(options.seed, list(range(len(self.composer.copies[0]))))
        self.optimizer = torch.optim.AdamW(
            [
                {"params": list(self.unet.parameters()), "factor": 1.0},
                {"params": list(self.text.parameters()), "factor": TEXT_LR_FACTOR},
            ],
            lr=options.lr,
            betas=(0.9, 0.99),
            weight_decay=0.01,
            fused=device.type == "cuda",
        )
        self.averages = Averages([self.unet, self.text], options.ema)
        self.run_unet: Any = self.unet
        self.encode: Any = self._encode

    def _autoencoder(self, options: argparse.Namespace) -> AutoencoderKL:
        folder = options.out / "vae"
        if options.compile_only:
            vae = autoencoder(options.preset)
        elif folder.is_dir():
            vae = AutoencoderKL.from_pretrained(folder)
        else:
            raise ModelNotFound(
                f"The autoencoder is missing: {folder}.", hint="Type: python -m training.emoji_sd.train_autoencoder"
            )
        vae = vae.to(self.device, memory_format=torch.channels_last).eval()
        return vae.requires_grad_(requires_grad=False)

    def _encode(self, images: Tensor) -> Tensor:
        mean, _ = self.vae.quant_conv(self.vae.encoder(images)).chunk(2, dim=1)
        return mean

    def compile(self) -> None:
        images = torch.rand(self.batch_size, 3, 128, 128, device=self.device)
        images = images.contiguous(memory_format=torch.channels_last)
        latents = torch.randn(self.batch_size, 4, 32, 32, device=self.device)
        hidden = torch.randn(self.batch_size, 77, self.text.config.hidden_size, device=self.device)
        times = torch.zeros(self.batch_size, dtype=torch.long, device=self.device)

        def try_encoder(encode: Any) -> None:
            with torch.no_grad(), autocast(self.device):
                encode(images)

        def try_unet(forward: Any) -> None:
            with autocast(self.device):
                # As in a step: the text encoder's output arrives in the autocast type and wants a gradient.
                words = (hidden.requires_grad_() * 1).to(torch.bfloat16 if self.device.type == "cuda" else hidden.dtype)
                out = forward(latents, times, encoder_hidden_states=words, return_dict=False)[0]
            out.float().square().mean().backward()
            self.optimizer.zero_grad(set_to_none=True)

        self.encode = compiled_or_plain(self._encode, try_encoder)
        self.run_unet = compiled_or_plain(self.unet, try_unet)

    def make(self, step: int) -> tuple[Any, Tensor]:
        """The CPU's share of a step: scenes and tokens, a function of (seed, step)."""
        pictures = self.sampler.batch(step, self.batch_size)
        random = Random(f"drop/{self.seed}/{step}")  # noqa: S311 # pictures, not secrets
        tokens = self.phrase_tokens.batch([picture.phrases for picture in pictures], CAPTION_DROP, random)
        return arrays_of(pictures), tokens.pin_memory() if self.device.type == "cuda" else tokens

    def step(self, step: int, made: tuple[Any, Tensor], lr: float) -> Tensor:
        """One optimiser step; returns the weighted loss, still on the device."""
        (rgb, layers), tokens = made
        device, size = self.device, self.batch_size
        generator = torch.Generator(device).manual_seed(self.seed * 1_000_003 + step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["factor"]
        with torch.no_grad(), autocast(device):
            images = (self.composer.compose(rgb, layers) * 2 - 1).contiguous(memory_format=torch.channels_last)
            latents = self.encode(images).float().contiguous() * self.vae.config.scaling_factor
        noise = torch.randn(latents.shape, device=device, generator=generator)
        # One time from each of `size` equal slices: the loss of a batch varies less than with free draws.
        slices = torch.arange(size, device=device) + torch.rand(size, device=device, generator=generator)
        times = (slices * (1000 / size)).long().clamp(max=999)
        alpha = self.alphas[times].view(-1, 1, 1, 1)
        # Contiguous, as in the trial of `compile`: other strides would compile the UNet a second time.
        noisy = (alpha.sqrt() * latents + (1 - alpha).sqrt() * noise).contiguous()
        target = alpha.sqrt() * noise - (1 - alpha).sqrt() * latents
        with autocast(device):
            hidden = self.text(tokens.to(device, non_blocking=True)).last_hidden_state
            if device.type == "cuda":
                hidden = hidden.to(torch.bfloat16)
            predicted = self.run_unet(noisy, times, encoder_hidden_states=hidden, return_dict=False)[0]
        errors = (predicted.float() - target).square().mean((1, 2, 3))
        loss = (errors * self.weights[times]).mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_([*self.unet.parameters(), *self.text.parameters()], 1.0)
        self.optimizer.step()
        self.averages.update(step)
        return loss.detach()

    def state(self) -> dict[str, Any]:
        return {
            "unet": self.unet.state_dict(),
            "text": self.text.state_dict(),
            "averages": self.averages.values,
            "optimizer": self.optimizer.state_dict(),
        }

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        self.unet.load_state_dict(state["unet"])
        self.text.load_state_dict(state["text"])
        self.optimizer.load_state_dict(state["optimizer"])
        for held, saved in zip(self.averages.values, state["averages"], strict=True):
            held.copy_(saved)

    def save_averages(self, folder: Path) -> None:
        """The averaged weights as Diffusers and Transformers folders, for export."""
        self.averages.swap()
        self.unet.save_pretrained(folder / "unet")
        self.text.save_pretrained(folder / "text_encoder")
        self.averages.swap()

    def pictures(self, prompts: list[Prompt], steps: int, guidance: float = 4.0) -> Tensor:
        """Samples of the averaged weights, from the uncompiled modules: another batch size would compile anew."""
        self.averages.swap()
        self.unet.eval()
        self.text.eval()
        try:
            with autocast(self.device):
                return sample(
                    [prompt.text for prompt in prompts],
                    self.tokenizer,
                    self.text,
                    self.unet,
                    self.vae,
                    self.scheduler,
                    steps=steps,
                    guidance=guidance,
                    seed=self.seed,
                )
        finally:
            self.unet.train()
            self.text.train()
            self.averages.swap()


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training.emoji_sd.train_unet", description=__doc__)
    add_common_options(parser, minutes=14, batch=256, lr=7e-4)
    parser.add_argument("--preset", choices=list(PRESETS), default="full")
    parser.add_argument("--glyphs", type=Path, default=GLYPHS_FILE)
    parser.add_argument("--tokenizer", type=Path, default=CACHE / "tokenizer")
    parser.add_argument("--ema", type=float, default=0.9995, help="decay of the weight averages")
    parser.add_argument("--init", type=Path, help="start from the weights of this Diffusers folder")
    parser.add_argument("--elapsed", type=float, default=0.0, help="with --init: minutes of the budget already spent")
    parser.add_argument(
        "--compile-only", action="store_true", help="fill the compiler's cache while another stage trains, then end"
    )
    parser.add_argument("--sample-every", type=float, default=3.0, metavar="MINUTES", help="0: no samples")
    parser.add_argument("--sample-count", type=int, default=64, help="prompts of each kind at each sampling")
    parser.add_argument("--sample-steps", type=int, default=20)
    return parser.parse_args(arguments)


def show_samples(stage: UNetStage, run: Run, step: int, count: int, steps: int) -> None:
    """A grid of trained (upper half) and held-out prompts, and their scores where an embedding is at hand."""
    trained, unseen = trained_prompts(count), held_out_prompts(count)
    images = stage.pictures([*trained, *unseen], steps)
    shown = min(count, 32)
    save_grid(torch.cat([images[:shown], images[count : count + shown]]), run.folder / f"samples-{step:06d}.png")
    file = run.folder / "embedding.safetensors"
    if file.exists():
        embedding = load_embedding(file, stage.device)
        for name, part, prompts in (("trained", images[:count], trained), ("held_out", images[count:], unseen)):
            shares = {key: sum(hits) / count for key, hits in asdict(match(part, prompts, embedding)).items()}
            run.log(step=step, prompts=name, **shares)


def main(arguments: list[str] | None = None) -> None:
    options = options_of(arguments)
    # Begun first: loading and compiling are part of the time that was given.
    budget = Budget(options.minutes, options.steps)
    run = Run("unet", options)
    stage = UNetStage(options)
    if options.compile_only:
        stage.compile()
        return
    first, spent = resumed(stage, run)
    budget.add(spent or options.elapsed * 60)
    if options.compile:
        stage.compile()
    next_sample = budget.elapsed + options.sample_every * 60

    def maybe_sample(step: int) -> None:
        nonlocal next_sample
        if options.sample_every and budget.elapsed > next_sample:
            show_samples(stage, run, step, options.sample_count, options.sample_steps)
            next_sample = budget.elapsed + options.sample_every * 60

    step = train(stage, run, options, budget, first, maybe_sample)
    stage.save_averages(options.out)
    if options.sample_every:
        show_samples(stage, run, step, options.sample_count, options.sample_steps)


if __name__ == "__main__":
    main()
