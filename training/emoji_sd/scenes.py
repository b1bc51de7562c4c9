"""What to draw: captioned scenes with their geometry, and plain random pictures; held-out combinations never occur.

Everything is a function of (seed, step): a resumed run sees the very pictures that an uninterrupted one sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from random import Random

import numpy as np

from rocm_sd.models.emoji import (
    COLOUR_JITTER,
    COLOURS,
    DEFAULT_COLOUR,
    EMOJI,
    POSITIONS,
    RELATIONS,
    SIZES,
    Scene,
    is_held_out,
    is_held_out_pair,
    phrases,
)

__all__ = ["Layer", "Picture", "SceneSampler", "random_layers"]

# 1,890 of the 3,789 emoji are skin-tone variants that share their drawing with a base: 0.6 of the weight of a base is
# enough for them, and gives each base a quarter more pictures.
TONED_WEIGHT = 0.6
SHARE_OF_PAIRS = 0.15
SHARE_WITH_SIZE = 0.10
SHARE_WITH_POSITION = 0.12
SHARE_WITH_COLOUR = 0.6


@dataclass(frozen=True)
class Layer:
    """One object: its side as a share of the frame's, and its centre in -1..1 (x to the right, y downwards)."""

    emoji: int
    scale: float
    x: float
    y: float


@dataclass(frozen=True)
class Picture:
    scene: Scene
    layers: tuple[Layer, ...]
    rgb: tuple[float, float, float]
    phrases: list[str]


class SceneSampler:
    def __init__(self, seed: int, emoji: list[int] | None = None) -> None:
        self.seed = seed
        self.emoji = list(range(len(EMOJI))) if emoji is None else emoji
        self.cumulative = list(accumulate(TONED_WEIGHT if EMOJI[i].toned else 1.0 for i in self.emoji))
        self.colours = list(COLOURS)

    def _emoji(self, random: Random) -> int:
        return random.choices(self.emoji, cum_weights=self.cumulative)[0]

    def _colour(self, random: Random, objects: tuple[int, ...]) -> str | None:
        if random.random() >= SHARE_WITH_COLOUR:
            return None
        allowed = [colour for colour in self.colours if not any(is_held_out(index, colour) for index in objects)]
        return random.choice(allowed)

    def _scene(self, random: Random) -> Scene:
        first = self._emoji(random)
        kind = random.random()
        if kind < SHARE_OF_PAIRS:
            second = self._emoji(random)
            while second == first or is_held_out_pair(first, second):
                second = self._emoji(random)
            objects = (first, second)
            return Scene(objects, self._colour(random, objects), relation=random.choice(list(RELATIONS)))
        kind -= SHARE_OF_PAIRS
        size = position = None
        if kind < SHARE_WITH_SIZE:
            size = random.choice(SIZES)
        elif kind < SHARE_WITH_SIZE + SHARE_WITH_POSITION:
            position = random.choice(list(POSITIONS))
            size = "small" if random.random() < 0.3 else None
        return Scene((first,), self._colour(random, (first,)), size=size, position=position)

    def picture(self, random: Random) -> Picture:
        scene = self._scene(random)
        colour = COLOURS[scene.colour or DEFAULT_COLOUR]
        # White stays white: it is the ground of every plain caption, and off-white looks like a fault.
        jitter = 0 if colour == COLOURS[DEFAULT_COLOUR] else COLOUR_JITTER
        rgb = tuple(min(255.0, max(0.0, value + random.uniform(-jitter, jitter))) / 255 for value in colour)
        return Picture(scene, _layout(scene, random), rgb, phrases(scene, random))

    def batch(self, step: int, size: int) -> list[Picture]:
        random = Random(f"{self.seed}/{step}")  # noqa: S311 # pictures, not secrets
        return [self.picture(random) for _ in range(size)]


def _layout(scene: Scene, random: Random) -> tuple[Layer, ...]:
    def wobble(amount: float) -> float:
        return random.uniform(-amount, amount)

    if scene.relation:
        x, y = RELATIONS[scene.relation]
        return tuple(
            Layer(emoji, random.uniform(0.44, 0.48), sign * x * 0.5 + wobble(0.03), sign * y * 0.5 + wobble(0.03))
            for emoji, sign in zip(scene.objects, (1, -1), strict=True)
        )
    emoji = scene.objects[0]
    if scene.position:
        scale = random.uniform(0.38, 0.46) if scene.size else random.uniform(0.48, 0.56)
        x, y = POSITIONS[scene.position]
        # The room between the object and the frame: standing off by 0.9 of it leaves a small margin.
        reach = (1 - scale) * 0.9
        return (Layer(emoji, scale, x * reach + wobble(0.03), y * reach + wobble(0.03)),)
    ranges = {"small": (0.38, 0.46), "large": (0.94, 1.0), None: (0.78, 0.84)}
    scale = random.uniform(*ranges[scene.size])
    room = min(0.03, 1 - scale)
    return (Layer(emoji, scale, wobble(room), wobble(room)),)


@dataclass(frozen=True)
class LayerArrays:
    """Objects of one depth: `sample` says in which picture of the batch each stands (no picture twice)."""

    sample: np.ndarray
    emoji: np.ndarray
    scale: np.ndarray
    x: np.ndarray
    y: np.ndarray


def arrays_of(pictures: list[Picture]) -> tuple[np.ndarray, list[LayerArrays]]:
    """(background [B, 3] in 0..1, layers from back to front)."""
    rgb = np.array([picture.rgb for picture in pictures], dtype=np.float32)
    layers = []
    for depth in range(max(len(picture.layers) for picture in pictures)):
        rows = [
            (sample, layer.emoji, layer.scale, layer.x, layer.y)
            for sample, picture in enumerate(pictures)
            for layer in picture.layers[depth : depth + 1]
        ]
        sample, emoji, scale, x, y = (np.array(column) for column in zip(*rows, strict=True))
        layers.append(LayerArrays(sample, emoji, scale.astype(np.float32), x.astype(np.float32), y.astype(np.float32)))
    return rgb, layers


def random_layers(
    seed: int, step: int, size: int, emoji: np.ndarray, share_of_pairs: float
) -> tuple[np.ndarray, list[LayerArrays]]:
    """Uncaptioned pictures of any size, place and named colour, for the embedding and the autoencoder."""
    rng = np.random.default_rng([seed, step])
    palette = np.array(list(COLOURS.values()), dtype=np.float32)
    # Half white, as in captioned scenes; every eighth any colour at all, so that no colour is unheard of.
    chosen = np.where(rng.random(size) < 0.4, 0, rng.integers(0, len(palette), size))
    rgb = palette[chosen] + rng.uniform(-COLOUR_JITTER, COLOUR_JITTER, (size, 3))
    rgb = np.where(rng.random((size, 1)) < 0.125, rng.uniform(0, 255, (size, 3)), rgb)
    scale = np.where(rng.random(size) < 0.55, rng.uniform(0.75, 1.0, size), rng.uniform(0.38, 0.75, size))
    reach = 1 - scale
    x, y = rng.uniform(-1, 1, size) * reach, rng.uniform(-1, 1, size) * reach
    pairs = int(size * share_of_pairs)
    # The first `pairs` pictures hold two objects side by side or one above the other.
    upright = rng.random(pairs) < 0.5
    first, second = rng.choice(emoji, size), rng.choice(emoji, pairs)
    scale[:pairs] = rng.uniform(0.42, 0.5, pairs)
    x[:pairs], y[:pairs] = np.where(upright, 0, -0.5), np.where(upright, -0.5, 0)
    x[:pairs] += rng.uniform(-0.03, 0.03, pairs)
    y[:pairs] += rng.uniform(-0.03, 0.03, pairs)
    as_float = np.float32
    layers = [LayerArrays(np.arange(size), first, scale.astype(as_float), x.astype(as_float), y.astype(as_float))]
    if pairs:
        layers.append(
            LayerArrays(
                np.arange(pairs),
                second,
                rng.uniform(0.42, 0.5, pairs).astype(as_float),
                (-x[:pairs]).astype(as_float),
                (-y[:pairs]).astype(as_float),
            )
        )
    return (np.clip(rgb, 0, 255) / 255).astype(as_float), layers
