"""Is stock as exact channels-last as in the layout that models come in? Measured here, against float64, once a process.

A layout is chosen for its convolutions, and whatever they hand on comes in it: torch has other kernels for it. oneDNN
with AVX-512 adds up a channels-last convolution in float32 in one chain, and with 256 channels its error is 3.7 times
that of its other layout. On a CPU of any kind torch's channels-last GroupNorm subtracts two large sums: where the mean
is 100 times the deviation its error is 300 times that of its other layout, and where it is 1000 times, as in a picture
of plain grey, the result is lost (2.13: 0.39 in place of 6e-5). Gradients go back through the same layout, and oneDNN's
of a convolution's input are 2.8 times as far off with AVX2, where its results are not.
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
    with torch.inference_mode(mode=False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
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
    """Of the result and of each gradient, whichever is worst; None where channels-last is no worse."""
    layouts = (torch.contiguous_format, torch.channels_last)
    exact = _with_gradients(operation, [tensor.double() for tensor in tensors])
    stock, ours = (
        _with_gradients(operation, [t.to(device).contiguous(memory_format=layout) for t in tensors])
        for layout in layouts
    )
    found = [_worse(*three, tensors[0].dtype) for three in zip(ours, stock, exact, strict=True)]
    return max((times for times in found if times is not None), default=None)


def _with_gradients(operation: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """What it makes of them, and for each the gradient of one weighted sum of that; in float64."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    result = operation(*leaves)
    # Laid out as the layers behind would hand it back.
    weights = torch.empty_like(result).copy_(torch.randn(result.shape, generator=torch.Generator().manual_seed(1)))
    return [part.detach().cpu().double() for part in (result, *torch.autograd.grad(result, leaves, weights))]


def _worse(ours: torch.Tensor, stock: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> float | None:
    far, allowed = _rms(ours - exact), _TIMES * _rms(stock - exact)
    rounding = torch.finfo(dtype).eps * _rms(exact)
    # Written so that NaN, which compares false, is worse.
    return None if far <= allowed + rounding else far / max(allowed / _TIMES, rounding)


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())
