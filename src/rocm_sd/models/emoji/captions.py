"""The grammar of captions: what a scene holds, and the words for it.

A caption is a list of phrases joined by single spaces. CLIP's tokenizer splits at spaces first, so the tokens of a
caption are the tokens of its phrases in a row; training relies on that to assemble captions from cached phrases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocm_sd.models.emoji.records import EMOJI, Emoji

if TYPE_CHECKING:
    from random import Random

__all__ = ["POSITIONS", "RELATIONS", "SIZES", "Scene", "caption", "phrases", "plain_caption", "with_article"]

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
