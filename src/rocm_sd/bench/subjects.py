"""What pictures are drawn of where their quality is scored, and the scores against the exact ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rocm_sd.errors import InvalidOption
from rocm_sd.files import text_of
from rocm_sd.models import EMBEDDED
from rocm_sd.quality import similarity
from rocm_sd.quality.budget import Scores

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch
    from PIL.Image import Image

    from rocm_sd.quality.prompt_match import Interval

    Matched = Callable[[Sequence[Image], Sequence[Image]], Interval]

__all__ = ["PROMPTS", "Subjects", "default_count", "from_file", "of_model", "scores"]

# For a model of which nothing else is known: faces, text, hair, repetition and plain areas, where a change shows first.
PROMPTS = (
    "a portrait of an old fisherman with a grey beard, natural light",
    "a shop sign that says OPEN above a wooden door",
    "a red fox in deep snow, pine trees behind it",
    "a bowl of ramen with an egg, seen from above",
    "a stone bridge over a river in autumn, oil painting",
    "a city street at night in the rain, neon lights",
    "a white sailing boat on a calm blue sea",
    "a bookshelf full of old books",
)
_FEWEST, _MOST = 2, 1000


@dataclass(frozen=True)
class Subjects:
    """Prompts, and what tells whether pictures show them: None where nothing here can read the pictures."""

    texts: tuple[str, ...]
    match: Matched | None = None


def default_count(device: torch.device) -> int:
    """On a CPU as many as an interval of their times needs."""
    return 8 if device.type == "cpu" else 24


def of_model(name: str, count: int) -> Subjects:
    """`name`: of the model. Other models than emoji-sd have eight prompts, however many are asked for."""
    if name != EMBEDDED:
        return Subjects(PROMPTS[:count])
    from rocm_sd.models.emoji import trained_prompts  # noqa: PLC0415 -- only this model needs them
    from rocm_sd.quality import prompt_match  # noqa: PLC0415
    from rocm_sd.quality.embedding import load_embedding  # noqa: PLC0415

    wanted, embedding = trained_prompts(count), load_embedding()

    def match(images: Sequence[Image], exact: Sequence[Image]) -> Interval:
        # An interrupted run has the first of them.
        ours, theirs = (
            prompt_match.match(similarity.as_tensor(each), wanted[: len(each)], embedding).top1
            for each in (images, exact)
        )
        return prompt_match.difference_interval(ours, theirs)

    return Subjects(tuple(prompt.text for prompt in wanted), match)


def from_file(file: Path) -> Subjects:

    def refused(why: str) -> InvalidOption:
        return InvalidOption("prompts", file, [], hint=f"It takes a text file with one prompt a line ({why}).")

    texts = [line.strip() for line in text_of(file, refused).splitlines() if line.strip()]
    if not _FEWEST <= len(texts) <= _MOST:
        hint = f"It has {len(texts)} prompts, and takes {_FEWEST} to {_MOST}, one a line."
        raise InvalidOption("prompts", file, [], hint=hint)
    return Subjects(tuple(texts))


def scores(images: Sequence[Any], exact: Sequence[Any], match: Matched | None) -> Scores:
    """Of pictures against the exact ones of the same prompts and seeds."""
    near = similarity.similarity(*(similarity.as_tensor(each) for each in (exact, images)))
    return Scores(near.psnr, near.ssim, None if match is None else match(images, exact))
