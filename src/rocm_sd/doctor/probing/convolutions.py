"""The convolutions that a picture is made of, timed in two ways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rocm_sd.doctor.probing.common import Place, medians, random

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    Tensors = tuple[torch.Tensor, torch.Tensor]

__all__ = ["LIMIT_S", "timed"]

# Seconds for all of them.
LIMIT_S = 18.0


@dataclass(frozen=True)
class Convolution:
    name: str
    channels: int
    size: int
    kernel: int


SHAPES = (
    Convolution("UNet, 320 channels at 64 x 64, 3 x 3", 320, 64, 3),
    Convolution("UNet, 1280 channels at 16 x 16, 3 x 3", 1280, 16, 3),
    Convolution("VAE, 512 channels at 64 x 64, 3 x 3", 512, 64, 3),
    # At 256 x 256 and not at the full 512: without its library torch unfolds the picture into 150 MB.
    Convolution("VAE, 128 channels at 256 x 256, 3 x 3", 128, 256, 3),
)


def timed(
    where: Place, ways: Callable[[Place, Tensors], Mapping[str, Callable[[], Any]]], quick: bool
) -> dict[str, Any]:
    """{"rows": [...]}, a row for each convolution: its name, and the milliseconds of each way."""
    taken = [(shape.name, medians(ways(where, _inputs(shape, where, quick=quick)), where)) for shape in SHAPES]
    return {"rows": [{"name": name, **{f"{way}_ms": ms for way, ms in each.items()}} for name, each in taken]}


def _inputs(shape: Convolution, where: Place, *, quick: bool) -> Tensors:
    """`quick` takes a quarter of the side and at most 320 channels; a CPU, at most 64."""
    small = quick or not where.is_gpu
    most = (320 if where.is_gpu else 64) if small else shape.channels
    channels, size = min(shape.channels, most), shape.size // 4 if small else shape.size
    picture = random(where, 1, channels, size, size)
    # Scaled so that the result is of the size of the picture: float16 must not overflow.
    kernel = random(where, channels, channels, shape.kernel, shape.kernel, seed=1)
    return picture, kernel * (channels * shape.kernel**2) ** -0.5
