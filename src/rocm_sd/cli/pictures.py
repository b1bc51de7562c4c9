"""Writing pictures: whole or not at all, with the parameters that made them inside the PNG."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from rocm_sd.cli.terminal import printable
from rocm_sd.errors import InvalidOption
from rocm_sd.files import is_special, told_when_full, whole, write_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["difference", "save_png", "save_text", "sheet", "writable_file", "writable_folder"]

_PAPER, _INK, _FRAME = "#ffffff", "#1a1a1a", "#d0d0d0"


def writable_folder(folder: Path) -> Path:
    """Make the folder before any work is done, so that a wrong --out costs nothing."""
    try:
        with told_when_full(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        raise InvalidOption(
            "--out", str(folder), [], hint=f"It cannot be written to ({error.strerror}). Choose another folder."
        ) from error
    return folder


def writable_file(path: Path) -> Path:
    """Likewise for a file that is to be written; a FIFO or a device is there already, and its folder is another's."""
    if path.is_dir():
        raise InvalidOption("--out", str(path), [], hint="It is a folder. Name a file.")
    if not is_special(path):
        writable_folder(Path(os.path.realpath(path)).parent)
    return path


def save_png(image: Image.Image, path: Path, parameters: Mapping[str, object]) -> None:
    metadata = PngInfo()
    metadata.add_text("Software", "rocm-sd")
    for name, value in parameters.items():
        metadata.add_itxt(name, printable(str(value)))
    with whole(path) as unfinished:
        image.save(unfinished, format="PNG", pnginfo=metadata)


def save_text(text: str, path: Path) -> None:
    write_text(path, text)


def difference(first: Image.Image, second: Image.Image, gain: int = 20) -> tuple[Image.Image, int]:
    """The absolute difference `gain` times amplified, and its largest value in steps of 1/255."""
    a, b = (np.asarray(image.convert("RGB"), dtype=np.int16) for image in (first, second))
    distance = np.abs(a - b)
    return Image.fromarray(np.clip(distance * gain, 0, 255).astype(np.uint8)), int(distance.max())


def sheet(rows: Sequence[Sequence[tuple[Image.Image, str]]], cell: int = 224) -> Image.Image:
    """Pictures in rows, each with its caption below it, wrapped to two lines."""
    margin, line = 14, 19
    caption = 2 * line + 10
    font = ImageFont.load_default(size=15)
    columns = max(len(row) for row in rows)
    paper = Image.new("RGB", (margin + columns * (cell + margin), margin + len(rows) * (cell + caption)), _PAPER)
    draw = ImageDraw.Draw(paper)
    for number, row in enumerate(rows):
        top = margin + number * (cell + caption)
        for column, (image, text) in enumerate(row):
            left = margin + column * (cell + margin)
            paper.paste(image.convert("RGB").resize((cell, cell), Image.Resampling.LANCZOS), (left, top))
            draw.rectangle((left, top, left + cell - 1, top + cell - 1), outline=_FRAME)
            for place, words in enumerate(_wrapped(text, cell, font)):
                draw.text((left, top + cell + 6 + place * line), words, fill=_INK, font=font)
    return paper


def _wrapped(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> list[str]:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines[:2]
