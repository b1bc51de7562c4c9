"""The glyph file: premultiplied RGBA, 128x128, predicted from the left neighbour and compressed with LZMA.

LZMA finds the same face in all its skin tones, and Python reads it with no further package.
"""

from __future__ import annotations

import lzma
import struct
from pathlib import Path

import numpy as np

from rocm_sd.errors import CorruptModel, ModelNotFound

__all__ = ["CACHE", "GLYPHS_FILE", "GLYPH_SIZE", "glyph_count", "pack_glyphs", "read_glyphs"]

GLYPH_SIZE = 128
CACHE = Path(".cache/emoji-sd")
GLYPHS_FILE = CACHE / "glyphs.bin"
_MAGIC = b"EMOJIGL1"


def pack_glyphs(glyphs: np.ndarray, preset: int = 6) -> bytes:
    """[E, 128, 128, 4] uint8 -> bytes."""
    planes = np.ascontiguousarray(glyphs.transpose(0, 3, 1, 2))
    delta = planes.copy()
    delta[..., 1:] -= planes[..., :-1]
    filters = [{"id": lzma.FILTER_LZMA2, "preset": preset, "dict_size": 1 << 26}]
    return _MAGIC + struct.pack("<I", len(glyphs)) + lzma.compress(delta.tobytes(), filters=filters)


def glyph_count(path: Path) -> int:
    with path.open("rb") as file:
        head = file.read(12)
    if len(head) < 12 or not head.startswith(_MAGIC):
        raise CorruptModel(f"{path} is not a glyph file.", hint="Type: python -m training.emoji_sd.render")
    return int(struct.unpack("<I", head[8:])[0])


def read_glyphs(path: Path = GLYPHS_FILE) -> np.ndarray:
    """[E, 128, 128, 4] uint8, premultiplied."""
    if not path.exists():
        raise ModelNotFound(f"The glyphs are missing: {path}.", hint="Type: python -m training.emoji_sd.render")
    count = glyph_count(path)
    try:
        raw = lzma.decompress(path.read_bytes()[12:])
        delta = np.frombuffer(raw, dtype=np.uint8).reshape(count, 4, GLYPH_SIZE, GLYPH_SIZE)
    except (lzma.LZMAError, ValueError) as error:
        raise CorruptModel(
            f"{path} cannot be read ({error}).", hint="Type: python -m training.emoji_sd.render"
        ) from error
    return np.cumsum(delta, axis=-1, dtype=np.uint8).transpose(0, 2, 3, 1)
