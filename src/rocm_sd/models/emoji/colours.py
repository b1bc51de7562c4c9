"""The background colours that emoji-sd knows by name; torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["COLOURS", "COLOUR_JITTER", "DEFAULT_COLOUR", "nearest_colour"]

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
