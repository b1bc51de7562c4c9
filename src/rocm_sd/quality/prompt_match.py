"""Does a picture show what its prompt says? Retrieval among all emoji by the shipped embedding; needs no download."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rocm_sd.models.emoji import EMOJI, Prompt
from rocm_sd.quality.embedding import EmojiEmbedding, background_colour

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["Interval", "Match", "bootstrap", "difference_interval", "match", "match_pairs"]


@dataclass(frozen=True)
class Interval:
    """A share with its 95% bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.1%} ({self.low:.1%} to {self.high:.1%})"


@dataclass(frozen=True)
class Match:
    """For each picture: its object retrieved first, among the first five, and the right background colour."""

    top1: list[bool]
    top5: list[bool]
    colour: list[bool]

    def intervals(self) -> dict[str, Interval]:
        return {"top-1": bootstrap(self.top1), "top-5": bootstrap(self.top5), "colour": bootstrap(self.colour)}


def match(images: Tensor, prompts: Sequence[Prompt], embedding: EmojiEmbedding) -> Match:
    """Pictures of one object; images [B, 3, H, W] in 0..1."""
    right = _among_five(images, [prompt.emoji[0] for prompt in prompts], embedding)
    colours = [background_colour(image) == prompt.colour for image, prompt in zip(images, prompts, strict=True)]
    return Match(right[:, 0].tolist(), right.any(dim=1).tolist(), colours)


def match_pairs(images: Tensor, prompts: Sequence[Prompt], embedding: EmojiEmbedding) -> list[bool]:
    """Pictures of two objects side by side: is each half's object among that half's five?"""
    height, width = images.shape[-2:]
    middle = slice(height // 4, height - height // 4)
    both = torch.ones(len(images), dtype=torch.bool)
    for place, half in enumerate((slice(0, width // 2), slice(width // 2, width))):
        wanted = [prompt.emoji[place] for prompt in prompts]
        both &= _among_five(images[:, :, middle, half], wanted, embedding).any(dim=1)
    return both.tolist()


def _among_five(images: Tensor, emoji: list[int], embedding: EmojiEmbedding) -> Tensor:
    parts = [images[start : start + 256] for start in range(0, len(images), 256)]
    found = torch.cat([embedding.retrieve(part, 5) for part in parts])
    # Emoji that the font draws alike are one look: no picture could tell them apart.
    wanted = torch.tensor([EMOJI[index].look for index in emoji])
    return found == wanted[:, None]


def bootstrap(hits: Sequence[bool], draws: int = 2000, seed: int = 0) -> Interval:
    return _interval(torch.tensor(hits, dtype=torch.float64), draws, seed)


def difference_interval(first: Sequence[bool], second: Sequence[bool], draws: int = 2000, seed: int = 0) -> Interval:
    """Share of `first` minus share of `second` over the same prompts, resampled in pairs."""
    one, other = (torch.tensor(hits, dtype=torch.float64) for hits in (first, second))
    return _interval(one - other, draws, seed)


def _interval(values: Tensor, draws: int, seed: int) -> Interval:
    picks = torch.randint(len(values), (draws, len(values)), generator=torch.Generator().manual_seed(seed))
    means = values[picks].mean(dim=1)
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(float(values.mean()), low, high)
