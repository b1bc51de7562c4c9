"""Stage 2: the image embedding, by classification of pictures into all looks under a cosine softmax."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import interpolate
from training.emoji_sd.compose import Composer
from training.emoji_sd.glyphs import GLYPHS_FILE, read_glyphs
from training.emoji_sd.loop import Budget, Run, add_common_options, autocast, pick_device, prefetched
from training.emoji_sd.scenes import random_layers

from rocm_sd.models.emoji import EMOJI
from rocm_sd.quality.embedding import EmojiEmbedding, load_embedding, look_ids

__all__ = ["degrade", "main", "save_embedding"]

SHARE_OF_PAIRS = 0.1
PAIR_WEIGHT = 0.3


def degrade(images: Tensor, generator: torch.Generator) -> Tensor:
    """What a lossy generator does to a picture: softness, noise, a shift in tone. The first half stays softer."""

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, device=images.device, generator=generator)

    batch, _, height, width = images.shape
    # Two shrinking factors a step, each for its own quarter: sizes stay fixed, so nothing is planned anew.
    for start, factor in ((0, 2), (batch // 4, 1.4)):
        part = images[start : start + batch // 4]
        small = interpolate(part, size=(int(height / factor), int(width / factor)), mode="bilinear", antialias=True)
        images[start : start + batch // 4] = interpolate(small, size=(height, width), mode="bilinear")
    noise = torch.randn(images.shape, device=images.device, generator=generator)
    images = images + noise * rand(batch, 1, 1, 1) ** 2 * 0.08
    contrast, shift = 1 + (rand(batch, 1, 1, 1) - 0.5) * 0.1, (rand(batch, 3, 1, 1) - 0.5) * 0.04
    return ((images - 0.5) * contrast + 0.5 + shift).clamp(0, 1)


def save_embedding(model: EmojiEmbedding, path: Path) -> None:
    state = {
        name: tensor.detach().cpu().contiguous() if name == "classes" else tensor.detach().cpu().half().contiguous()
        for name, tensor in model.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }
    save_file(state, path, metadata={"format": "pt"})


@torch.no_grad()
def accuracy(
    model: EmojiEmbedding, composer: Composer, emoji: np.ndarray, seed: int, pictures: int = 2048
) -> tuple[float, float]:
    """Top-1 and top-5 on single objects drawn from a seed that training never uses, degraded as in training."""
    looks = torch.tensor([e.look for e in EMOJI])
    first = five = total = 0
    for step in range(max(1, pictures // 256)):
        rgb, layers = random_layers(seed + 1_000_003, step, 256, emoji, 0.0)
        generator = torch.Generator(composer.device).manual_seed(step)
        found = model.retrieve(degrade(composer.compose(rgb, layers), generator), 5)
        right = found == looks[torch.from_numpy(layers[0].emoji)][:, None]
        first, five, total = first + int(right[:, 0].sum()), five + int(right.any(1).sum()), total + len(right)
    return first / total, five / total


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m training.emoji_sd.train_embedding", description=__doc__)
    add_common_options(parser, minutes=1.5, batch=512, lr=2e-3)
    parser.add_argument("--glyphs", type=Path, default=GLYPHS_FILE)
    parser.add_argument("--log-every", type=int, default=100)
    options = parser.parse_args(arguments)
    device = pick_device(options.device)
    torch.manual_seed(options.seed)
    run = Run("embedding", options)
    composer = Composer(read_glyphs(options.glyphs), device)
    looks = look_ids()
    drawable = np.array([index for index in looks if index < len(composer.copies[0])])
    label_of = torch.full((len(EMOJI),), -1, dtype=torch.long)
    label_of[torch.tensor(looks)] = torch.arange(len(looks))
    model = EmojiEmbedding().to(device, memory_format=torch.channels_last).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.02, fused=device.type == "cuda")
    state = run.load()
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    budget = Budget(options.minutes, options.steps, state["elapsed"] if state else 0.0)
    step = state["step"] if state else 0

    def save() -> None:
        run.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "elapsed": budget.elapsed}
        )

    def make(number: int) -> tuple:
        return random_layers(options.seed, number, options.batch, drawable, SHARE_OF_PAIRS)

    pairs = int(options.batch * SHARE_OF_PAIRS)
    for step, (rgb, layers) in prefetched(make, step):
        if budget.fraction(step) >= 1 or run.must_stop:
            break
        generator = torch.Generator(device).manual_seed(options.seed * 1_000_003 + step)
        labels = label_of[torch.from_numpy(layers[0].emoji)].to(device, non_blocking=True)
        second = label_of[torch.from_numpy(layers[1].emoji)].to(device) if pairs else labels[:0]
        for group in optimizer.param_groups:
            group["lr"] = options.lr * budget.lr_factor(step, options.warmup)
        images = degrade(composer.compose(rgb, layers), generator).contiguous(memory_format=torch.channels_last)
        with autocast(device):
            logits = model.logits(images)
        chances = logits.float().log_softmax(1)
        own = chances.gather(1, labels[:, None])[:, 0]
        # Two objects: naming either is right.
        either = torch.logaddexp(own[:pairs], chances[:pairs].gather(1, second[:, None])[:, 0])
        loss = -(own[pairs:].sum() + PAIR_WEIGHT * either.sum()) / options.batch
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % options.log_every == 0:
            run.log(step=step, minutes=budget.elapsed / 60, loss=loss.item(), lr=optimizer.param_groups[0]["lr"])
        if run.save_is_due:
            save()
    save()
    if budget.fraction(step) < 1:
        print("embedding: stopped early; the same command resumes")
        return
    model.eval()
    path = options.out / "embedding.safetensors"
    save_embedding(model, path)
    top1, top5 = accuracy(load_embedding(path, device), composer, drawable, options.seed)
    run.log(step=step, minutes=budget.elapsed / 60, top1=top1, top5=top5, megabytes=path.stat().st_size / 1e6)


if __name__ == "__main__":
    main()
