"""Stage 2: the image embedding, by classification of pictures into all looks under a cosine softmax."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import interpolate
from training.emoji_sd.compose import Composer
from training.emoji_sd.glyphs import GLYPHS_FILE, read_glyphs
from training.emoji_sd.loop import Budget, Run, add_common_options, autocast, pick_device, resumed, train
from training.emoji_sd.scenes import LayerArrays, random_layers

from rocm_sd.models.emoji import EMOJI
from rocm_sd.quality.embedding import EmojiEmbedding, load_embedding, look_ids

__all__ = ["degrade", "main", "save_embedding"]

SHARE_OF_PAIRS = 0.1
PAIR_WEIGHT = 0.3
# Cosines lie in -1..1: with 3,771 classes a scale of 24 lets the right one reach probability 0.99.
LOGIT_SCALE = 24.0


def degrade(images: Tensor, generator: torch.Generator) -> Tensor:
    """What a lossy generator does to a picture: softness (for half of the batch), noise, a shift in tone."""

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
    path.chmod(0o644)


@torch.no_grad()
def accuracy(
    model: EmojiEmbedding, composer: Composer, emoji: np.ndarray, seed: int, pictures: int
) -> tuple[float, float]:
    """Top-1 and top-5 on single objects drawn from a seed that training never uses, degraded as in training."""
    looks = torch.tensor([e.look for e in EMOJI])
    first = five = total = 0
    size = min(256, pictures)
    for step in range(pictures // size):
        rgb, layers = random_layers(seed + 1_000_003, step, size, emoji, 0.0)
        generator = torch.Generator(composer.device).manual_seed(step)
        found = model.retrieve(degrade(composer.compose(rgb, layers), generator), 5)
        right = found == looks[torch.from_numpy(layers[0].emoji)][:, None]
        first, five, total = first + int(right[:, 0].sum()), five + int(right.any(1).sum()), total + len(right)
    return first / total, five / total


class EmbeddingStage:
    def __init__(self, options: argparse.Namespace) -> None:
        self.device = device = pick_device(options.device)
        self.seed, self.batch_size = options.seed, options.batch
        torch.manual_seed(options.seed)
        self.composer = Composer(read_glyphs(options.glyphs), device)
        looks = look_ids()
        self.drawable = np.array([index for index in looks if index < len(self.composer.copies[0])])
        self.label_of = np.full(len(EMOJI), -1)
        self.label_of[looks] = np.arange(len(looks))
        self.model = EmojiEmbedding().to(device, memory_format=torch.channels_last).train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=options.lr, weight_decay=0.02, fused=device.type == "cuda"
        )

    def make(self, step: int) -> tuple[np.ndarray, list[LayerArrays]]:
        return random_layers(self.seed, step, self.batch_size, self.drawable, SHARE_OF_PAIRS)

    def _labels(self, layer: LayerArrays) -> Tensor:
        return self.composer.send(self.label_of[layer.emoji])

    def step(self, step: int, made: tuple[np.ndarray, list[LayerArrays]], lr: float) -> Tensor:
        rgb, layers = made
        generator = torch.Generator(self.device).manual_seed(self.seed * 1_000_003 + step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        images = degrade(self.composer.compose(rgb, layers), generator)
        with autocast(self.device):
            vectors = self.model(images.contiguous(memory_format=torch.channels_last))
        # In float32: bfloat16 would round logits near 24 to eighths.
        chances = (LOGIT_SCALE * self.model.cosines(vectors)).log_softmax(1)
        own = chances.gather(1, self._labels(layers[0])[:, None])[:, 0]
        total = own.sum()
        if len(layers) == 2:
            # Two objects: naming either is right.
            pairs = len(layers[1].sample)
            other = chances[:pairs].gather(1, self._labels(layers[1])[:, None])[:, 0]
            total = own[pairs:].sum() + PAIR_WEIGHT * torch.logaddexp(own[:pairs], other).sum()
        loss = -total / self.batch_size
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m training.emoji_sd.train_embedding", description=__doc__)
    add_common_options(parser, minutes=1.5, batch=512, lr=2e-3)
    parser.add_argument("--glyphs", type=Path, default=GLYPHS_FILE)
    parser.add_argument("--check-pictures", type=int, default=4096, help="pictures for the accuracy at the end")
    options = parser.parse_args(arguments)
    budget = Budget(options.minutes, options.steps)
    run = Run("embedding", options)
    stage = EmbeddingStage(options)
    first, spent = resumed(stage, run)
    budget.add(spent)
    step = train(stage, run, options, budget, first)
    if budget.fraction(step) < 1:
        return
    stage.model.eval()
    path = options.out / "embedding.safetensors"
    save_embedding(stage.model, path)
    model = load_embedding(path, stage.device)
    top1, top5 = accuracy(model, stage.composer, stage.drawable, options.seed, options.check_pictures)
    run.log(step=step, minutes=budget.elapsed / 60, top1=top1, top5=top5, megabytes=path.stat().st_size / 1e6)


if __name__ == "__main__":
    main()
