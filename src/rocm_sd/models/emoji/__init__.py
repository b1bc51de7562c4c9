"""What emoji-sd knows: its emoji, colours, caption grammar, held-out combinations and fixed prompt sets.

Torch-free: training, evaluation and the command line all read this one description. `emoji.json` is written by
`python -m training.emoji_sd.render`; an emoji's id is its position in that file.

A caption is a list of phrases joined by single spaces. CLIP's tokenizer splits at spaces first, so the tokens of a
caption are the tokens of its phrases in a row; training relies on that to assemble captions from cached phrases.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from rocm_sd.errors import CorruptModel, ModelNotFound

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

__all__ = [
    "COLOURS", "COLOUR_JITTER", "DEFAULT_COLOUR", "DEMO_PROMPTS", "EMBEDDING_FILE", "EMOJI", "MODEL_FOLDER",
    "POSITIONS", "RECORDS_FILE", "REINSTALL", "RELATIONS", "SIZES", "Emoji", "Prompt", "Scene", "caption", "find_emoji",
    "held_out_pair_prompts", "held_out_prompts", "is_held_out", "is_held_out_pair", "nearest_colour", "phrases",
    "plain_caption", "read_records", "trained_prompts",
]  # fmt: skip

# The Diffusers folder, the image embedding and the list of emoji that ship with the package.
MODEL_FOLDER = Path(__file__).parent / "emoji-sd"
EMBEDDING_FILE = Path(__file__).parent / "embedding.safetensors"
RECORDS_FILE = Path(__file__).with_name("emoji.json")
REINSTALL = "Type: pip install --force-reinstall rocm-sd"
HELD_OUT_ONE_IN = 10  # combinations, which training never shows

RGB = tuple[int, int, int]

# The two nearest (gray, purple) are 94 apart in RGB: a jitter of 8 per channel (14 at most) never crosses a border.
COLOURS: dict[str, RGB] = {
    "white": (255, 255, 255),
    "black": (16, 16, 16),
    "gray": (128, 128, 128),
    "red": (220, 40, 40),
    "orange": (255, 140, 0),
    "yellow": (255, 230, 60),
    "green": (40, 160, 60),
    "cyan": (60, 215, 230),
    "blue": (40, 80, 220),
    "purple": (130, 50, 180),
    "pink": (255, 150, 200),
    "brown": (120, 72, 32),
}
COLOUR_JITTER = 8
# What a caption that names no colour means.
DEFAULT_COLOUR = "white"


def nearest_colour(rgb: Sequence[float]) -> str:
    """The named colour of least squared RGB distance; rgb in 0..255."""
    return min(COLOURS, key=lambda name: sum((a - b) ** 2 for a, b in zip(COLOURS[name], rgb, strict=True)))


@dataclass(frozen=True)
class Emoji:
    """One drawable emoji. `look` is the id of the first emoji with the very same pixels (mostly its own id)."""

    id: int
    text: str
    name: str
    aliases: tuple[str, ...]
    look: int
    toned: bool


def read_records(path: Path = RECORDS_FILE) -> tuple[Emoji, ...]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["emoji"]
        return tuple(
            Emoji(
                id=index,
                text=row["text"],
                name=row["name"],
                aliases=tuple(row.get("aliases", ())),
                look=row.get("look", index),
                toned=row.get("toned", False),
            )
            for index, row in enumerate(rows)
        )
    except FileNotFoundError:
        raise ModelNotFound(f"The list of emoji is missing: {path}.", hint=REINSTALL) from None
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptModel(f"The list of emoji cannot be read: {path} ({error}).", hint=REINSTALL) from error


EMOJI: tuple[Emoji, ...] = read_records()
_BY_NAME = {word.lower(): emoji for emoji in EMOJI for word in (*emoji.aliases, emoji.name, emoji.text)}


def find_emoji(name: str) -> Emoji | None:
    """The emoji of that name, alias or character: find_emoji("red apple"), find_emoji("🍎")."""
    return _BY_NAME.get(name.strip().lower())


def stable_rank(*parts: object) -> int:
    """64 bits that depend on the parts alone: for orders and splits that must never change between versions."""
    return int.from_bytes(sha256("|".join(map(str, parts)).encode()).digest()[:8], "big")


@cache
def _held_out_colours(emoji: int) -> frozenset[str]:
    text = EMOJI[emoji].text
    return frozenset(
        colour
        for colour in COLOURS
        if colour != DEFAULT_COLOUR and stable_rank("colour", text, colour) % HELD_OUT_ONE_IN == 0
    )


def is_held_out(emoji: int, colour: str | None) -> bool:
    """Was this emoji never trained on this background? The default background is always trained."""
    return colour is not None and colour in _held_out_colours(emoji)


def is_held_out_pair(a: int, b: int) -> bool:
    """Were these two emoji never trained in one picture? The order does not matter."""
    return stable_rank("pair", *sorted((EMOJI[a].text, EMOJI[b].text))) % HELD_OUT_ONE_IN == 0


SIZES = ("small", "large")
# The phrase and the direction (x to the right, y downwards) in which the object stands off the centre.
POSITIONS: dict[str, tuple[int, int]] = {
    "in the centre": (0, 0),
    "in the top left corner": (-1, -1),
    "in the top right corner": (1, -1),
    "in the bottom left corner": (-1, 1),
    "in the bottom right corner": (1, 1),
    "at the top": (0, -1),
    "at the bottom": (0, 1),
    "on the left": (-1, 0),
    "on the right": (1, 0),
}
# The first object's direction from the centre; the second stands opposite.
RELATIONS: dict[str, tuple[int, int]] = {"and": (-1, 0), "next to": (-1, 0), "above": (0, -1)}
_SOUNDS_LIKE_YOU = ("uni", "use", "uk", "european", "eu", "one", "ur", "ukrain", "uzbek", "ugand", "united")
# Adjectives stay before the name: "a small frog".
_BARE_FORMS = ("{name}", "{a}", "{a}", "{name} emoji", "{a} emoji", "a picture of {a}", "an emoji of {a}", "the {name}")


@dataclass(frozen=True)
class Scene:
    """What a picture shows. Two objects exactly when `relation` is set; size and position belong to one object."""

    objects: tuple[int, ...]
    colour: str | None = None
    size: str | None = None
    position: str | None = None
    relation: str | None = None


def with_article(name: str) -> str:
    first = name.lower()
    vowel = first[0] in "aeiou" and not first.startswith(_SOUNDS_LIKE_YOU)
    return f"{'an' if vowel else 'a'} {name}"


def _word_for(emoji: Emoji, random: Random) -> str:
    # One caption in four uses another name where there is one: the main name must be the best known.
    if emoji.aliases and random.random() < 0.25:
        return random.choice(emoji.aliases)
    return emoji.name


def _one_object(scene: Scene, random: Random) -> list[str]:
    name = _word_for(EMOJI[scene.objects[0]], random)
    if scene.size:
        name = f"{scene.size} {name}"
    form = random.choice(_BARE_FORMS)
    return [form.format(name=name, a=with_article(name))]


def _two_objects(scene: Scene, random: Random) -> list[str]:
    first, second = (_word_for(EMOJI[index], random) for index in scene.objects)
    assert scene.relation is not None
    if random.random() < 0.2:
        return [first, scene.relation, second]
    return [with_article(first), scene.relation, with_article(second)]


def phrases(scene: Scene, random: Random) -> list[str]:
    """One of the ways to say this scene, chosen by `random`, as phrases to be joined by spaces."""
    words = _two_objects(scene, random) if scene.relation else _one_object(scene, random)
    tail = [scene.position] if scene.position else []
    if scene.colour:
        way = random.random()
        if way < 0.75:
            tail.append(f"on a {scene.colour} background")
        elif way < 0.9:
            tail.append(f"with a {scene.colour} background")
        else:
            words[-1] += ","
            tail.append(f"{scene.colour} background")
    if len(tail) == 2 and random.random() < 0.3:
        tail.reverse()
    # "an orange" rather than "a orange"; the model hears both from people, and from training the right one.
    return words + [phrase.replace(" a orange ", " an orange ") for phrase in tail]


def caption(scene: Scene, random: Random) -> str:
    return " ".join(phrases(scene, random))


def plain_caption(scene: Scene) -> str:
    """The one plain way to say a scene, with main names: "a frog on a pink background"."""
    names = [EMOJI[index].name for index in scene.objects]
    if scene.size:
        names[0] = f"{scene.size} {names[0]}"
    words = [with_article(names[0])]
    if scene.relation:
        words += [scene.relation, with_article(names[1])]
    if scene.position:
        words.append(scene.position)
    if scene.colour:
        words.append(f"on {with_article(scene.colour)} background")
    return " ".join(words)


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
