"""training/ is no part of the package: it is found from the repository's root."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

GLYPHS = 40


@pytest.fixture(scope="session")
def glyphs() -> np.ndarray:
    """[40, 128, 128, 4]: discs of different colours, premultiplied, opaque inside and clear outside."""
    rows, columns = np.mgrid[0:128, 0:128]
    inside = ((rows - 63.5) ** 2 + (columns - 63.5) ** 2 < 60**2).astype(np.uint8)
    colours = np.random.default_rng(0).integers(0, 255, (GLYPHS, 3)).astype(np.uint8)
    pictures = np.zeros((GLYPHS, 128, 128, 4), dtype=np.uint8)
    pictures[..., :3] = inside[None, ..., None] * colours[:, None, None]
    pictures[..., 3] = inside * 255
    return pictures


@pytest.fixture(scope="session")
def cache(glyphs, tmp_path_factory) -> Path:
    """A folder with a glyph file and the tokenizer, as `render` leaves it."""
    from training.emoji_sd.glyphs import pack_glyphs
    from training.emoji_sd.tokenizer import build_tokenizer

    folder = tmp_path_factory.mktemp("cache")
    (folder / "glyphs.bin").write_bytes(pack_glyphs(glyphs, preset=1))
    build_tokenizer(folder / "tokenizer")
    return folder
