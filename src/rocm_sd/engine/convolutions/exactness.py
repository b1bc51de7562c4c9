"""Is stock as exact channels-last as in the layout that models come in? Measured here, against float64, once a process.

A layout is chosen for its convolutions, and whatever they hand on comes in it: torch has other kernels for it. oneDNN
with AVX-512 adds up a channels-last convolution in float32 in one chain, and with 256 channels its error is 3.7 times
that of its other layout. On a CPU of any kind torch's channels-last GroupNorm subtracts two large sums: where the mean
is 100 times the deviation its error is 300 times that of its other layout, and where it is 1000 times, as in a picture
of plain grey, the result is lost (2.13: 0.39 in place of 6e-5).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["why_less_exact"]

# What a whole picture may be further from exact than stock's: an error of all its layers is one of the picture.
_TIMES = 1.5
# As many as the blocks in the middle of a small model have, where the order of a sum begins to matter.
_CHANNELS, _SIDE = 256, 8
# Of the mean, in deviations: about none behind most layers, hundreds in plain parts of a picture.
_MEANS = (0.0, 10.0, 1000.0)


@cache
def why_less_exact(device: torch.device, dtype: torch.dtype) -> str | None:
    """Which of stock's operations are further from exact channels-last, and how much; None where none is."""
    for name, operation, *tensors in _operations(dtype):
        times = _times_as_far(operation, tensors, device)
        if times is not None:
            kind = str(dtype).removeprefix("torch.")
            return f"channels-last, {kind} {name} are {times:.3g} times as far from exact here"
    return None


def _operations(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """All that a model does between two convolutions and that adds anything up."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, _CHANNELS, _SIDE, _SIDE, generator=random)
    # In half precision the rounding of each result is a thousand times as large as what the order of a sum makes.
    if dtype is torch.float32:
        weight = torch.randn(_CHANNELS, _CHANNELS, 3, 3, generator=random) / (9 * _CHANNELS) ** 0.5
        yield "convolutions", _convolved, x, weight
    for mean in _MEANS:
        yield "group norms", _normalized, (x + mean).to(dtype)
    yield "averages", _averaged, x.to(dtype)


def _convolved(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x, weight, padding=1)


def _normalized(x: torch.Tensor) -> torch.Tensor:
    return F.group_norm(x, 32)


def _averaged(x: torch.Tensor) -> torch.Tensor:
    return F.avg_pool2d(x, 2)


def _times_as_far(
    operation: Callable[..., torch.Tensor], tensors: list[torch.Tensor], device: torch.device
) -> float | None:
    """None where channels-last is no worse."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        exact = operation(*(tensor.double() for tensor in tensors))
        stock, ours = (
            _rms(operation(*(t.to(device).contiguous(memory_format=layout) for t in tensors)).cpu().double() - exact)
            for layout in (torch.contiguous_format, torch.channels_last)
        )
    rounding = torch.finfo(tensors[0].dtype).eps * _rms(exact)
    # Written so that NaN, which compares false, is worse.
    return None if ours <= _TIMES * stock + rounding else ours / max(stock, rounding)


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())
