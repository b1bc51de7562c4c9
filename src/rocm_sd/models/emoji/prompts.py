"""Fixed prompt sets for evaluation: the same prompts for the same n and seed, on every machine and version."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from rocm_sd.models.emoji.captions import Scene, plain_caption
from rocm_sd.models.emoji.colours import COLOURS, DEFAULT_COLOUR
from rocm_sd.models.emoji.records import EMOJI
from rocm_sd.models.emoji.split import is_held_out, is_held_out_pair, stable_rank

__all__ = ["DEMO_PROMPTS", "Prompt", "held_out_pair_prompts", "held_out_prompts", "trained_prompts"]

DEMO_PROMPTS = (
    "a frog on a pink background",
    "a red apple on a blue background",
    "a rocket on a black background",
    "a cat face on a yellow background",
    "a jack-o-lantern on a purple background",
    "a penguin on a cyan background",
    "a red heart next to a yellow heart",
    "a small star in the top right corner on a green background",
)


@dataclass(frozen=True)
class Prompt:
    """A prompt and what a right picture of it shows: emoji ids in reading order, and the background colour."""

    text: str
    emoji: tuple[int, ...]
    colour: str


def _prompt(scene: Scene) -> Prompt:
    return Prompt(plain_caption(scene), scene.objects, scene.colour or DEFAULT_COLOUR)


def _in_order(seed: int, purpose: str) -> list[int]:
    return sorted(range(len(EMOJI)), key=lambda index: stable_rank(purpose, seed, EMOJI[index].text))


def trained_prompts(n: int, seed: int = 0) -> list[Prompt]:
    """n prompts whose combination was trained: a third names no colour, the rest one of the twelve.

    Each emoji comes once before any comes twice.
    """
    order = _in_order(seed, "trained")
    prompts = []
    for number in range(n):
        emoji = order[number % len(order)]
        colours = [colour for colour in COLOURS if not is_held_out(emoji, colour)]
        choice = stable_rank("trained-colour", seed, number, EMOJI[emoji].text)
        colour = None if number % 3 == 0 else colours[choice % len(colours)]
        prompts.append(_prompt(Scene((emoji,), colour)))
    return prompts


def held_out_prompts(n: int, seed: int = 0) -> list[Prompt]:
    """n prompts with an (emoji, colour) combination that training never showed; fewer where there are fewer."""
    pairs = [(index, colour) for index in range(len(EMOJI)) for colour in COLOURS if is_held_out(index, colour)]
    pairs.sort(key=lambda pair: stable_rank("held-out", seed, EMOJI[pair[0]].text, pair[1]))
    return [_prompt(Scene((index,), colour)) for index, colour in pairs[:n]]


def held_out_pair_prompts(n: int, seed: int = 0) -> list[Prompt]:
    """n prompts of two emoji that training never showed together, side by side on the default background."""
    order = _in_order(seed, "pair")
    prompts: list[Prompt] = []
    for step in count(1):
        for place, first in enumerate(order):
            if len(prompts) == n:
                return prompts
            second = order[(place + step) % len(order)]
            if first != second and is_held_out_pair(first, second):
                prompts.append(_prompt(Scene((first, second), relation="next to")))
    raise AssertionError("count() never ends")
