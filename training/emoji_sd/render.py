"""Stage 1: draw every emoji of Noto Color Emoji, write the glyphs, the records and the tokenizer.

Glyphs travel to the training machine as one file; the records (names, looks) are package data.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import numpy as np
from PIL import Image, ImageFont, features
from training.emoji_sd.glyphs import GLYPH_SIZE, GLYPHS_FILE, glyph_count, pack_glyphs, read_glyphs
from training.emoji_sd.names import fully_qualified, unique_names

from rocm_sd.errors import MissingDependency, ModelNotFound
from rocm_sd.models.emoji import RECORDS_FILE

__all__ = ["FONT", "draw", "main"]

FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
# The font holds bitmaps of one size, 136x128, which FreeType offers as 109 pixels per em.
STRIKE = 109


def open_font(path: Path) -> ImageFont.FreeTypeFont:
    if not path.exists():
        raise ModelNotFound(
            f"The emoji font is missing: {path}.",
            hint="Type: sudo apt-get install fonts-noto-color-emoji (or name the file with --font)",
        )
    if not features.check("raqm"):
        raise MissingDependency("Pillow with raqm (text shaping for joined emoji)", "dev")
    return ImageFont.truetype(str(path), STRIKE, layout_engine=ImageFont.Layout.RAQM)


def draw(font: ImageFont.FreeTypeFont, text: str, one_advance: float) -> np.ndarray | None:
    """[128, 128, 4] uint8 with alpha premultiplied, or None where the font has no single glyph for `text`."""
    if font.getlength(text) != one_advance:
        return None
    mask = font.getmask(text, mode="RGBA")
    if 0 in mask.size:
        return None
    width, height = mask.size
    pixels = np.asarray(mask, dtype=np.uint8).reshape(height, width, 4)
    if not pixels[..., 3].any():
        return None
    side = max(width, height)
    # Premultiplied before the resize, or the colour of transparent pixels bleeds into the edges.
    canvas = np.zeros((side, side, 4), dtype=np.float32)
    top, left = (side - height) // 2, (side - width) // 2
    colour, alpha = pixels[..., :3].astype(np.float32), pixels[..., 3:].astype(np.float32)
    canvas[top : top + height, left : left + width] = np.concatenate([colour * alpha / 255, alpha], axis=-1)
    planes = [
        Image.fromarray(canvas[..., c]).resize((GLYPH_SIZE, GLYPH_SIZE), Image.Resampling.LANCZOS) for c in range(4)
    ]
    resized = np.stack([np.asarray(plane) for plane in planes], axis=-1)
    resized[..., :3] = np.minimum(resized[..., :3], resized[..., 3:])
    return np.clip(np.rint(resized), 0, 255).astype(np.uint8)


def draw_all(font: ImageFont.FreeTypeFont, texts: list[str]) -> tuple[list[str], np.ndarray, list[str]]:
    """(drawn texts, [E, 128, 128, 4], texts the font cannot draw)."""
    one_advance = font.getlength("\N{RED APPLE}")
    drawn, glyphs, missing = [], [], []
    for text in texts:
        glyph = draw(font, text, one_advance)
        if glyph is None:
            missing.append(text)
        else:
            drawn.append(text)
            glyphs.append(glyph)
    return drawn, np.stack(glyphs), missing


def write_records(path: Path, texts: list[str], glyphs: np.ndarray, missing: list[str]) -> int:
    """Writes emoji.json and returns how many different looks there are."""
    first_with: dict[str, int] = {}
    rows = []
    for index, (text, (name, aliases)) in enumerate(zip(texts, unique_names(texts), strict=True)):
        look = first_with.setdefault(hashlib.sha256(glyphs[index].tobytes()).hexdigest(), index)
        row: dict[str, object] = {"text": text, "name": name}
        if aliases:
            row["aliases"] = aliases
        if look != index:
            row["look"] = look
        if "skin tone" in name:
            row["toned"] = True
        rows.append(row)
    head = {
        "source": "names: PyPI package emoji; pictures: Noto Color Emoji (SIL Open Font License 1.1)",
        "looks": len(first_with),
        "not_in_the_font": missing,
    }
    body = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text(f'{json.dumps(head, ensure_ascii=False)[:-1]}, "emoji": [\n{body}\n]}}\n', encoding="utf-8")
    return len(first_with)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m training.emoji_sd.render", description=__doc__)
    parser.add_argument("--font", type=Path, default=FONT)
    parser.add_argument("--glyphs", type=Path, default=GLYPHS_FILE, help="where the packed glyphs go")
    parser.add_argument("--records", type=Path, default=RECORDS_FILE, help="where the names go")
    options = parser.parse_args(arguments)
    font = open_font(options.font)
    texts, glyphs, missing = draw_all(font, fully_qualified())
    looks = write_records(options.records, texts, glyphs, missing)
    print(f"{len(texts)} emoji drawn, {looks} different looks; {len(missing)} the font lacks are listed in the records")
    options.glyphs.parent.mkdir(parents=True, exist_ok=True)
    options.glyphs.write_bytes(pack_glyphs(glyphs))
    assert np.array_equal(read_glyphs(options.glyphs), glyphs)
    print(f"{options.glyphs}: {options.glyphs.stat().st_size / 1e6:.1f} MB, {glyph_count(options.glyphs)} glyphs")
    # After the records are written: the tokenizer learns its words from them.
    from training.emoji_sd.tokenizer import build_tokenizer  # noqa: PLC0415

    tokenizer = build_tokenizer(options.glyphs.parent / "tokenizer", options.records)
    print(f"{options.glyphs.parent / 'tokenizer'}: {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
