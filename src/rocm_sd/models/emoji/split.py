"""Which combinations are held out of training: about one in ten, chosen by hash, the same on every machine."""

from __future__ import annotations

from functools import cache
from hashlib import sha256

from rocm_sd.models.emoji.colours import COLOURS, DEFAULT_COLOUR
from rocm_sd.models.emoji.records import EMOJI

__all__ = ["HELD_OUT_ONE_IN", "is_held_out", "is_held_out_pair", "stable_rank"]

HELD_OUT_ONE_IN = 10


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
