"""Pictures from glyphs on the training device: placed by an affine grid, blended over a plain background."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, interpolate
from training.emoji_sd.glyphs import GLYPH_SIZE

if TYPE_CHECKING:
    from training.emoji_sd.scenes import LayerArrays

__all__ = ["Composer"]

# (side of the stored copy, scales it serves): bilinear sampling aliases when it shrinks by much more than a fifth.
_COPIES = ((128, 0.86, np.inf), (96, 0.62, 0.86), (64, 0.0, 0.62))


class Composer:
    """Holds all glyphs in three sizes (455 MB for 3,789 of them) and draws batches."""

    def __init__(self, glyphs: np.ndarray, device: torch.device | str) -> None:
        self.device = torch.device(device)
        full = torch.from_numpy(np.ascontiguousarray(glyphs.transpose(0, 3, 1, 2)))
        self.copies = []
        for side, _, _ in _COPIES:
            parts = [self._shrunk(part, side) for part in full.split(256)]
            self.copies.append(torch.cat(parts))

    def _shrunk(self, part: Tensor, side: int) -> Tensor:
        part = part.to(self.device)
        if side == GLYPH_SIZE:
            return part
        small = interpolate(part.float(), size=(side, side), mode="bilinear", antialias=True)
        return small.round().clamp(0, 255).to(torch.uint8)

    def send(self, array: np.ndarray) -> Tensor:
        """The array on the device."""
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            # Pinned and asynchronous: a plain copy would wait for every step still queued on the device.
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor

    def compose(self, rgb: np.ndarray, layers: list[LayerArrays]) -> Tensor:
        """[B, 3, 128, 128] in 0..1."""
        picture = self.send(rgb)[:, :, None, None].repeat(1, 1, GLYPH_SIZE, GLYPH_SIZE)
        for layer in layers:
            for copy, (_, low, high) in zip(self.copies, _COPIES, strict=True):
                rows = np.flatnonzero((layer.scale >= low) & (layer.scale < high))
                if rows.size:
                    self._blend(picture, copy, layer, rows)
        return picture.clamp_(0, 1)

    def _blend(self, picture: Tensor, copy: Tensor, layer: LayerArrays, rows: np.ndarray) -> None:
        zoom = 1 / layer.scale[rows]
        theta = np.zeros((rows.size, 2, 3), dtype=np.float32)
        theta[:, 0, 0] = theta[:, 1, 1] = zoom
        theta[:, 0, 2], theta[:, 1, 2] = -layer.x[rows] * zoom, -layer.y[rows] * zoom
        glyphs = copy[self.send(layer.emoji[rows])].float().div_(255)
        grid = affine_grid(self.send(theta), [rows.size, 4, GLYPH_SIZE, GLYPH_SIZE], align_corners=False)
        drawn = grid_sample(glyphs, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        where = self.send(layer.sample[rows])
        picture[where] = picture[where] * (1 - drawn[:, 3:]) + drawn[:, :3]
