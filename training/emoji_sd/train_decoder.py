"""Stage 7: the small decoder, distilled from the VAE's decoder; it needs the exported model and no glyphs.

It learns from latents that the model draws, and from pictures that the VAE encodes with its noise: those of the glyphs
where there are any, and otherwise those that the model has drawn, turned, moved, scaled and recoloured.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import affine_grid, avg_pool2d, grid_sample, l1_loss, mse_loss
from training.emoji_sd.compose import Composer
from training.emoji_sd.glyphs import GLYPHS_FILE, read_glyphs
from training.emoji_sd.grids import save_grid
from training.emoji_sd.loop import Budget, Run, add_common_options, autocast, pick_device, resumed, train
from training.emoji_sd.scenes import SceneSampler, random_layers

from rocm_sd.models.emoji import MODEL_FOLDER, held_out_prompts
from rocm_sd.models.emoji.decoder import EmojiDecoder, load_decoder, teacher_of, weights_of
from rocm_sd.quality.embedding import load_embedding

__all__ = ["DecoderStage", "begin_as_teacher", "main", "save_decoder", "ssim"]

LARGEST = 2_000_000
# Of a batch: latents as the model draws them, which is what the decoder is for. The rest are encoded pictures.
SHARE_DRAWN = 0.5
SHARE_OF_PAIRS = 0.15
# Of the L1 and the squared error's sum, which is 0.05 to 0.02 in the end; 1 - SSIM is as large by then.
SSIM_WEIGHT = 0.1
LIKENESS_WEIGHT = 0.05
# What a sampler leaves behind, and more.
LATENT_NOISE = 0.05
GUIDANCE = 3.0
_WINDOW = 7  # of SSIM


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """[B]: structural similarity of pictures in 0..1, by windows of 7x7 inside of the frame and sample covariances."""
    pixels = _WINDOW * _WINDOW
    unbiased = pixels / (pixels - 1)
    mean_a, mean_b = avg_pool2d(a, _WINDOW, 1), avg_pool2d(b, _WINDOW, 1)
    variance_a = (avg_pool2d(a * a, _WINDOW, 1) - mean_a * mean_a) * unbiased
    variance_b = (avg_pool2d(b * b, _WINDOW, 1) - mean_b * mean_b) * unbiased
    covariance = (avg_pool2d(a * b, _WINDOW, 1) - mean_a * mean_b) * unbiased
    c1, c2 = 0.01**2, 0.03**2
    alike = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
    return (alike / ((mean_a * mean_a + mean_b * mean_b + c1) * (variance_a + variance_b + c2))).mean((1, 2, 3))


@torch.no_grad()
def begin_as_teacher(decoder: EmojiDecoder, vae: Any) -> None:
    """What both have at 32x32 begins with the VAE's weights, so far as there is as much of it.

    The pixels of a place begin alike: begun at random each, they left a pattern of 2x2 for hundreds of steps.
    """
    teacher = vae.decoder
    for layer in (decoder.to_fine, decoder.to_pixels):
        for value in (layer.weight, layer.bias):
            value.copy_(value[::4].repeat_interleave(4, 0))
    decoder.quant.load_state_dict(vae.post_quant_conv.state_dict())
    if decoder.conv_in.weight.shape != teacher.conv_in.weight.shape:
        return
    decoder.conv_in.load_state_dict(teacher.conv_in.state_dict())
    blocks = [*teacher.mid_block.resnets, *teacher.up_blocks[0].resnets]
    for mine, other in zip(decoder.blocks, blocks, strict=False):
        mine.load_state_dict(other.state_dict())


@torch.no_grad()
def draw(pipe: Any, texts: list[str], *, steps: int, batch: int, seed: int) -> Tensor:
    """[N, 4, 32, 32] latents as the VAE decodes them; each depends on its text and (seed, its number) alone."""
    parts = []
    for start in range(0, len(texts), batch):
        part = texts[start : start + batch]
        generators = [torch.Generator().manual_seed(seed * 1_000_003 + start + number) for number in range(len(part))]
        drawn = pipe(
            part, num_inference_steps=steps, guidance_scale=GUIDANCE, generator=generators, output_type="latent"
        )
        parts.append(drawn.images.float() / pipe.vae.config.scaling_factor)
    return torch.cat(parts)


def turned(pictures: Tensor, others: Tensor, random: np.random.Generator) -> Tensor:
    """Pictures in -1..1 turned, mirrored, scaled, moved and recoloured, some with the half of another beside theirs."""
    count, device = len(pictures), pictures.device
    angle = random.integers(0, 4, count) * (np.pi / 2) + random.normal(0, 0.1, count)
    zoom, mirror = random.uniform(0.7, 1.5, count), random.choice([-1.0, 1.0], count)
    theta = np.zeros((count, 2, 3), dtype=np.float32)
    theta[:, 0, 0], theta[:, 0, 1] = np.cos(angle) * zoom * mirror, -np.sin(angle) * zoom
    theta[:, 1, 0], theta[:, 1, 1] = np.sin(angle) * zoom * mirror, np.cos(angle) * zoom
    theta[:, :, 2] = random.uniform(-0.2, 0.2, (count, 2))
    grid = affine_grid(torch.from_numpy(theta).to(device), list(pictures.shape), align_corners=False)
    moved = grid_sample(pictures, grid, padding_mode="border", align_corners=False)
    beside = torch.from_numpy(random.random(count) < SHARE_OF_PAIRS).to(device)[:, None, None, None]
    left = torch.arange(pictures.shape[-1], device=device) < pictures.shape[-1] // 2
    moved = torch.where(beside & left, others, moved)
    order = torch.from_numpy(np.stack([random.permutation(3) for _ in range(count)])).to(device)
    recoloured = random.random(count) < 0.5
    order[torch.from_numpy(~recoloured).to(device)] = torch.arange(3, device=device)
    moved = moved.gather(1, order[:, :, None, None].expand_as(moved))
    tone = torch.from_numpy(random.uniform(-0.15, 0.15, (count, 3, 1, 1)).astype(np.float32)).to(device)
    return (moved + tone).clamp(-1, 1)


class DecoderStage:
    def __init__(self, options: argparse.Namespace) -> None:
        self.device = device = pick_device(options.device)
        self.seed, self.batch_size = options.seed, options.batch
        torch.manual_seed(options.seed)
        pipe = StableDiffusionPipeline.from_pretrained(options.model).to(device)
        pipe.set_progress_bar_config(disable=True)
        self.vae = pipe.vae.eval().requires_grad_(requires_grad=False).to(memory_format=torch.channels_last)
        self.embedding = load_embedding(options.embedding, device)
        drawing = {"steps": options.draw_steps, "batch": options.draw_batch}
        sampler, random = SceneSampler(options.seed), Random(options.seed)  # noqa: S311 # pictures, not secrets
        texts = [" ".join(sampler.picture(random).phrases) for _ in range(options.drawn)]
        self.drawn = draw(pipe, texts, seed=options.seed, **drawing)
        held_out = [prompt.text for prompt in held_out_prompts(options.check, options.seed)]
        # Drawn as they are in use, from prompts and a seed that training never has.
        self.held_out = draw(
            pipe, held_out, seed=options.seed + 1_000_003, steps=options.check_steps, batch=options.draw_batch
        )
        print(f"{len(self.drawn)} latents drawn to learn from, {len(self.held_out)} to check with", flush=True)
        self.composer = Composer(read_glyphs(options.glyphs), device) if options.glyphs.exists() else None
        self.pictures = torch.cat([self.taught(part).clamp(-1, 1).half() for part in self.drawn.split(16)])
        self.decoder = EmojiDecoder(**options.shape)
        begin_as_teacher(self.decoder, self.vae)
        self.decoder.to(device, memory_format=torch.channels_last).train()
        self.optimizer = torch.optim.AdamW(
            self.decoder.parameters(), lr=options.lr, betas=(0.9, 0.99), weight_decay=0.0, fused=device.type == "cuda"
        )
        # A CPU takes longer for a lesson than to learn it: there each is given several times.
        self.pool = [self._lesson(-1 - number, 16) for number in range(options.pool // 16)]
        if self.pool:
            print(f"{16 * len(self.pool)} lessons made", flush=True)

    @torch.no_grad()
    def taught(self, latents: Tensor) -> Tensor:
        """In float32: bfloat16's errors would be learnt."""
        pictures: Tensor = self.vae.decode(latents).sample
        return pictures

    @torch.no_grad()
    def _lesson(self, step: int, count: int) -> tuple[Tensor, Tensor]:
        """(latents, what the VAE makes of them), a function of (seed, step)."""
        random = np.random.default_rng([self.seed, abs(step), int(step < 0)])
        generator = torch.Generator(self.device).manual_seed(self.seed * 1_000_003 + step % (1 << 31))
        as_drawn = int(count * SHARE_DRAWN)
        chosen = torch.from_numpy(random.integers(0, len(self.drawn), count)).to(self.device)
        parts = [self.drawn[chosen[:as_drawn]]]
        if count > as_drawn:
            images = self._images(random, chosen[as_drawn:], step)
            moments = self.vae.encode(images).latent_dist
            noise = torch.randn(moments.mean.shape, device=self.device, generator=generator)
            parts.append(moments.mean + moments.std * noise)
        latents = torch.cat(parts)
        spread = torch.rand(count, 1, 1, 1, device=self.device, generator=generator) * LATENT_NOISE
        latents = latents + spread * torch.randn(latents.shape, device=self.device, generator=generator)
        return latents, self.taught(latents)

    def _images(self, random: np.random.Generator, chosen: Tensor, step: int) -> Tensor:
        if self.composer is not None:
            emoji = np.arange(len(self.composer.copies[0]))
            layers = random_layers(self.seed, step % (1 << 31), len(chosen), emoji, SHARE_OF_PAIRS)
            return self.composer.compose(*layers) * 2 - 1
        pictures = self.pictures[chosen].float()
        return turned(pictures, pictures.roll(1, 0), random)

    def make(self, step: int) -> list[int]:
        """Which of the pool's lessons a step has; of a fresh one, nothing is made ahead."""
        random = np.random.default_rng([self.seed, step, 2])
        count = len(self.pool) * 16
        return [int(number) for number in random.integers(0, count, self.batch_size)] if count else []

    def _batch(self, step: int, made: list[int]) -> tuple[Tensor, Tensor]:
        if not made:
            return self._lesson(step, self.batch_size)
        rows = [(self.pool[number // 16], number % 16) for number in made]
        return torch.stack([lesson[0][row] for lesson, row in rows]), torch.stack([t[1][row] for t, row in rows])

    def loss(self, latents: Tensor, wanted: Tensor) -> Tensor:
        with autocast(self.device):
            drawn = self.decoder(latents.contiguous(memory_format=torch.channels_last))
        drawn = drawn.float()
        mine, theirs = drawn / 2 + 0.5, wanted / 2 + 0.5
        with autocast(self.device):
            vectors = self.embedding(mine), self.embedding(theirs).detach()
        unlike = 1 - (vectors[0] * vectors[1]).sum(1).mean()
        near = l1_loss(drawn, wanted) + mse_loss(drawn, wanted)
        return near + SSIM_WEIGHT * (1 - ssim(mine, theirs).mean()) + LIKENESS_WEIGHT * unlike

    def step(self, step: int, made: list[int], lr: float) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self.loss(*self._batch(step, made))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.decoder.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def state(self) -> dict[str, Any]:
        return {"model": self.decoder.state_dict(), "optimizer": self.optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self.decoder.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def save_decoder(decoder: EmojiDecoder, teacher: str, path: Path) -> None:
    state, told = weights_of(decoder, teacher)
    save_file(state, path, metadata=told)
    path.chmod(0o644)


@torch.no_grad()
def check(decoder: EmojiDecoder, stage: DecoderStage, grid: Path) -> dict[str, float]:
    """Of pictures with 256 tones, as files have them; the grid shows the VAE's above the small decoder's."""
    theirs, mine = [], []
    for latents in stage.held_out.split(16):
        theirs.append(_as_in_files(stage.taught(latents)))
        mine.append(_as_in_files(decoder(latents)))
    exact, drawn = torch.cat(theirs), torch.cat(mine)
    shown = len(exact) // 8 * 8
    if shown:
        pairs = [part[: min(shown, 32)].unflatten(0, (-1, 8)) for part in (exact, drawn)]
        save_grid(torch.stack(pairs, 1).flatten(0, 2), grid)
    psnr = (-10 * (exact - drawn).square().mean((1, 2, 3)).clamp_min(1e-10).log10()).tolist()
    return {
        "psnr_median": statistics.median(psnr),
        "psnr_worst": min(psnr),
        "ssim_mean": ssim(exact, drawn).mean().item(),
        "checked": len(psnr),
    }


def _as_in_files(pictures: Tensor) -> Tensor:
    return (pictures.float() / 2 + 0.5).clamp(0, 1).mul(255).round().div(255)


def _shape(text: str) -> dict[str, int]:
    shape = dict(zip(("channels", "blocks", "groups", "fine"), map(int, text.split(",")), strict=True))
    return {name: value for name, value in shape.items() if value}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m training.emoji_sd.train_decoder", description=__doc__)
    add_common_options(parser, minutes=3, batch=64, lr=1e-3)
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER, help="the Diffusers folder (default: the shipped)")
    parser.add_argument("--embedding", type=Path, help="default: the shipped one")
    parser.add_argument("--glyphs", type=Path, default=GLYPHS_FILE, help="used where the file is there")
    parser.add_argument("--shape", type=_shape, default=_shape("96,4,16,32"), help="channels,blocks,groups,fine")
    parser.add_argument("--drawn", type=int, default=4096, help="latents that the model draws to learn from")
    parser.add_argument("--draw-steps", type=int, default=20)
    parser.add_argument("--draw-batch", type=int, default=256)
    parser.add_argument("--check", type=int, default=256, help="held-out prompts for the check at the end")
    parser.add_argument("--check-steps", type=int, default=20)
    parser.add_argument("--pool", type=int, default=0, help="lessons that are made once; 0: new ones in each step")
    options = parser.parse_args(arguments)
    run = Run("decoder", options)
    stage = DecoderStage(options)
    # The time to draw what is learnt from is not the schedule's.
    budget = Budget(options.minutes, options.steps)
    first, spent = resumed(stage, run)
    budget.add(spent)
    step = train(stage, run, options, budget, first)
    if budget.fraction(step) < 1:
        return
    path = options.out / "decoder.safetensors"
    save_decoder(stage.decoder, teacher_of(stage.vae), path)
    size = path.stat().st_size
    decoder, _ = load_decoder(path)
    found = check(decoder.to(stage.device), stage, options.out / "decoder.png")
    record = {
        **{name: round(value, 4) for name, value in found.items()},
        "parameters": sum(parameter.numel() for parameter in decoder.parameters()),
        "bytes": size,
        "steps": step,
        "batch": options.batch,
        "minutes": round(budget.elapsed / 60, 2),
        "drawn": options.drawn,
        "pool": options.pool,
        "pictures": "glyphs" if stage.composer is not None else "drawn by the model",
        "seed": options.seed,
        "device": torch.cuda.get_device_name() if stage.device.type == "cuda" else "CPU",
        "torch": torch.__version__,
    }
    (options.out / "decoder.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    run.log(step=step, minutes=budget.elapsed / 60, **found, megabytes=size / 1e6)
    if size > LARGEST:
        print(f"{path} takes {size / 1e6:.2f} MB, more than the 2 MB it may", flush=True)


if __name__ == "__main__":
    main()
