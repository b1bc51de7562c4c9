"""The emoji that emoji-sd was trained on: id, characters, readable name, other names, and the look they share.

`emoji.json` is written by `python -m training.emoji_sd.render`; ids are positions in that file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rocm_sd.errors import CorruptModel, ModelNotFound

__all__ = ["EMOJI", "RECORDS_FILE", "Emoji", "find_emoji", "read_records"]

RECORDS_FILE = Path(__file__).with_name("emoji.json")


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
        raise ModelNotFound(
            f"The list of emoji is missing: {path}.", hint="Type: pip install --force-reinstall rocm-sd"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptModel(
            f"The list of emoji cannot be read: {path} ({error}).", hint="Type: pip install --force-reinstall rocm-sd"
        ) from error


EMOJI: tuple[Emoji, ...] = read_records()
_BY_NAME = {word.lower(): emoji for emoji in EMOJI for word in (*emoji.aliases, emoji.name, emoji.text)}


def find_emoji(name: str) -> Emoji | None:
    """The emoji of that name, alias or character: find_emoji("red apple"), find_emoji("🍎")."""
    return _BY_NAME.get(name.strip().lower())
