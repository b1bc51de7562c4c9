"""How visible the borders of tiles are: gradients across them, against those everywhere else.

seams(image, rows, columns) = mean |I(y) - I(y - 1)| over the lines at borders / the same over all other lines; of rows
and columns together. 1: nothing sets the borders apart. A hard seam has several times the gradient of its picture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rocm_sd.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["seams"]

# A VAE's convolutions spread a step of the latents over the pixels beside it.
_BESIDE = 1


def seams(image: Tensor, rows: Sequence[int], columns: Sequence[int]) -> float:
    """image: [..., H, W]; `rows` and `columns`: the first line after each border. Raises where there is no border."""
    across, elsewhere = [], []
    for axis, borders in ((-2, rows), (-1, columns)):
        steps = image.double().diff(dim=axis).abs().movedim(axis, 0).flatten(1).mean(1)
        near = torch.zeros(len(steps), dtype=torch.bool)
        for border in borders:
            if not 0 < border <= len(steps):
                raise Unsupported("seams", f"a border at {border} of a picture with {len(steps) + 1} lines")
            near[max(0, border - 1 - _BESIDE) : border + _BESIDE] = True
        across.append(steps[near])
        elsewhere.append(steps[~near])
    at, other = torch.cat(across), torch.cat(elsewhere)
    if not len(at) or not len(other):
        raise Unsupported("seams", "a picture without borders of tiles, or with nothing else")
    return float(at.mean() / other.mean()) if float(other.mean()) else float("inf" if float(at.mean()) else 1.0)
