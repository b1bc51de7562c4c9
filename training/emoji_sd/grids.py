"""Pictures side by side in one PNG."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from PIL import Image

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["save_grid"]


def save_grid(images: torch.Tensor, path: Path, columns: int = 8) -> None:
    """images [N, 3, H, W] in 0..1, row by row."""
    count, _, height, width = images.shape
    rows = -(-count // columns)
    pixels = (images.detach().float().cpu().clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    sheet = Image.new("RGB", (columns * width, rows * height), "white")
    for index, picture in enumerate(pixels):
        sheet.paste(Image.fromarray(picture), (index % columns * width, index // columns * height))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, optimize=True)
