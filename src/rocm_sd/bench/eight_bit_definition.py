"""What an engine's layers in 8 bits are to compute, in float64, by the weights and the calibration of a stock pipeline.

    y = sum over k of (q_x * s_x) * (q_w * s_w) + bias

q_w * s_w is the value of the format next to the weight, and s_x follows from what came in. Which way a value is rounded
hangs on chance, and whole pictures would hide a small error of one layer: each is held to its definition by itself. Its
weights tell a wrong scale or format, its scale of x a wrong calibration, its product on what came into it a wrong
kernel. What is wrong between layers, as in a norm that rounds for the next one, shows in pictures: `define` makes a
stock pipeline of any dtype compute like that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from rocm_sd.engine.approximation import eight_bit_layers, observe
from rocm_sd.ops.eight_bits import LIMITS
from rocm_sd.ops.quantize_rows.reference import quantize_rows
from rocm_sd.rewrite.eight_bits import FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rocm_sd.rewrite.eight_bits import EightBitLayer

__all__ = ["EightBitDefinition"]

# Of stock's error with the same values: as for single ops, nothing of it is chance.
_TIMES = 2.0
# What came in may be so many times as large as the largest of the pictures that were tried.
_HEADROOM = 2.0
_ROWS = 64
# Of a weight: float32 rounds its scale, and the quotient by it.
_FLOAT32 = 4 * torch.finfo(torch.float32).eps
_TINY = torch.finfo(torch.float64).tiny
_HALF_DIGITS = 2.0**11


@dataclass(frozen=True)
class _Seen:
    """Of one layer of a stock pipeline. `largest`: of x as it is smoothed; `rows`: some of what came in."""

    largest: float
    rows: torch.Tensor


class EightBitDefinition:
    """Of the layers that a pipeline of `dtype` has now, by their names in it; of none where it has none in 8 bits."""

    def __init__(self, pipe: Any, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._layers: dict[str, EightBitLayer] = {
            f"{part}.{name}": layer
            for part, model in pipe.components.items()
            if isinstance(model, nn.Module)
            for name, layer in eight_bit_layers(model).items()
        }
        self._wrong_weights: list[str] | None = None
        self._seen: dict[str, _Seen] = {}

    @torch.no_grad()
    def define(self, pipe: Any) -> Any:
        """A stock pipeline, whose layers of these names compute by the definition from then on, in their own dtype."""
        if not self._layers:
            return pipe
        theirs = {name: _named(pipe, name) for name in self._layers}
        if self._wrong_weights is None:
            self._wrong_weights = list(self._compared(theirs))
        # The random numbers of a picture are others in other dtypes.
        if next(iter(theirs.values())).weight.dtype is self._dtype:
            self._seen = self._observed(pipe, theirs)
        for name, layer in theirs.items():
            layer.weight.data.copy_(_dequantized(self._layers[name]))
            layer.register_forward_pre_hook(_Rounding(self._layers[name]))
        return pipe

    def _observed(self, pipe: Any, theirs: Mapping[str, nn.Module]) -> dict[str, _Seen]:
        seen = {}
        halves = {"decoded": "vae.", "encoded": "vae.encoder."}
        asked = {half: any(name.startswith(part) for name in theirs) for half, part in halves.items()}
        for name, one in observe(pipe, theirs, **asked).items():
            factors = self._layers[name].smoothing
            largest = one.largest if factors is None else (one.columns * factors.to(one.columns)).amax()
            rows = one.rows[:: max(1, len(one.rows) // _ROWS)][:_ROWS]
            seen[name] = _Seen(float(largest), rows.cpu())
        return seen

    def why_wrong(self) -> str | None:
        """The first layer that computes something else, in words; a stock pipeline of the dtype has been defined."""
        return next(self._wrong(), None)

    def _wrong(self) -> Iterator[str]:
        eps = torch.finfo(self._dtype).eps
        yield from self._wrong_weights or []
        for name, layer in self._layers.items():
            if layer.x_scale is not None:
                right = self._seen[name].largest * _HEADROOM / LIMITS[FORMATS[layer.weight.dtype]]
                off = abs(float(layer.x_scale) - right) / max(right, _TINY)
                # Whichever way a card's libraries take, half of the digits are the same.
                if not off <= eps**0.5:
                    yield f"the scale of what comes into {name} is {off:.2g} of itself from the calibrated one"
            error, stock = _product_errors(layer, self._seen[name].rows)
            # Written so that NaN, which compares false, is wrong.
            if not error <= _TIMES * stock + eps:
                yield f"the product of {name} has an error of {error:.3g}, stock's of the same values has {stock:.3g}"

    def _compared(self, theirs: Mapping[str, Any]) -> Iterator[str]:
        """No value is further from its weight than half a step of the format, and each bias is stock's."""
        weights = {name: stock.weight for name, stock in theirs.items()}
        scales = self._scales(weights)
        for name, layer in self._layers.items():
            bias, own = theirs[name].bias, layer.bias
            if (own is None) is not (bias is None) or not (bias is None or bool((bias == own.to(bias)).all())):
                yield f"the bias of {name} is another one than stock's"
            wide, scale = _smoothed(weights[name], layer), _by_row(scales[name], layer)
            off = (_stored(layer).to(wide.device) - wide).abs()
            most = _half_steps(wide / scale, layer.weight.dtype) * scale + _FLOAT32 * wide.abs()
            wrong = int((~(off <= most)).sum())
            if wrong:
                yield f"{wrong} weights of {name} are more than half a step of 8 bits from what they stand for"

    def _scales(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """By the largest value of each row, or with one scale by that of all layers of one input."""
        found, of_input = {}, dict[str, torch.Tensor]()
        for name, layer in self._layers.items():
            rows = _smoothed(weights[name], layer).flatten(1).abs().amax(1)
            scale = (rows / LIMITS[FORMATS[layer.weight.dtype]]).clamp_min(_TINY)
            if not layer.weight_scale.dim():
                shared = of_input.get(self._input_of(name))
                scale = scale.amax() if shared is None else torch.maximum(scale.amax(), shared)
                of_input[self._input_of(name)] = scale
            found[name] = scale
        return {name: of_input.get(self._input_of(name), scale) for name, scale in found.items()}

    def _input_of(self, name: str) -> str:
        origin = self._layers[name].origin
        return name if origin is None else f"{name.partition('.')[0]}.{origin.input}"


def _named(pipe: Any, name: str) -> Any:
    part, _, path = name.partition(".")
    return getattr(pipe, part).get_submodule(path)


def _by_row(scale: torch.Tensor, layer: EightBitLayer) -> torch.Tensor:
    return scale.view(-1, *[1] * (layer.weight.dim() - 1)) if scale.dim() else scale


def _smoothed(weight: torch.Tensor, layer: EightBitLayer) -> torch.Tensor:
    """In float64, as it was rounded: what x is multiplied by, the weight is divided by."""
    wide = weight.detach().double()
    return wide if layer.smoothing is None else wide / layer.smoothing.to(wide)


def _stored(layer: EightBitLayer) -> torch.Tensor:
    """q_w * s_w in float64, as it is smoothed."""
    return layer.weight.float().double() * _by_row(layer.weight_scale.double(), layer)


def _dequantized(layer: EightBitLayer) -> torch.Tensor:
    """The same in place of the weight, for an x that is not smoothed."""
    stored = _stored(layer)
    return stored if layer.smoothing is None else stored * layer.smoothing.to(stored)


def _half_steps(values: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    """Half of the distance between the two values of the format that each lies between."""
    if to is torch.int8:
        return torch.full_like(values, 0.5)
    kind = torch.finfo(to)
    # Below the smallest normal number steps stay what they are there.
    powers = torch.exp2(values.abs().clamp_min(kind.smallest_normal).log2().floor())
    return powers * kind.eps / 2


def _rounded(layer: EightBitLayer, x: torch.Tensor) -> torch.Tensor:
    """q_x * s_x in float64, for a weight that is not smoothed."""
    if not layer.rounds_x:
        return x.double()
    given = None if layer.x_scale is None else layer.x_scale.to(x.device).view(1)
    factors = None if layer.smoothing is None else layer.smoothing.to(x.device, x.dtype)
    q, own = quantize_rows(x if factors is None else x * factors, FORMATS[layer.weight.dtype], given)
    rounded = q.float().double() * (own.unsqueeze(-1) if given is None else given).double()
    return rounded if factors is None else rounded / factors.double()


class _Rounding:
    """Before the forward of a stock layer that has the definition's weight."""

    def __init__(self, layer: EightBitLayer) -> None:
        self._layer = layer

    def __call__(self, _module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, *others = args
        near = _in_half(x) if x.dtype is torch.float32 and self._layer.rounds_x else x
        return (_rounded(self._layer, near).to(x.dtype), *others)


def _in_half(x: torch.Tensor) -> torch.Tensor:
    """With the digits of half precision. By float32's own, few values are so near to the middle of a step that they are
    rounded the other way than in float64: whether one is, in stock or in the engine, would be chance, and one is more
    than all else that float32 rounds.
    """
    part, exponent = torch.frexp(x)
    return torch.ldexp((part * _HALF_DIGITS).round() / _HALF_DIGITS, exponent)


@torch.no_grad()
def _product_errors(layer: EightBitLayer, rows: torch.Tensor) -> tuple[float, float]:
    """(the layer's, that of stock's product in the same dtype), over the norm of the product in float64."""
    x = rows.to(layer.weight.device)
    # A filter's taps, as they were taken from under it, are a picture of its size.
    x = x.view(-1, layer.in_channels, *layer.kernel_size) if isinstance(layer, nn.Conv2d) else x
    rounded = _rounded(layer, x)

    def multiplied(dtype: torch.dtype) -> torch.Tensor:
        bias = layer.bias
        own = bias.detach().to(dtype) if isinstance(bias, torch.Tensor) else None
        values, weight = rounded.to(dtype), _dequantized(layer).to(dtype)
        if isinstance(layer, nn.Conv2d):
            return F.conv2d(values, weight, own, layer.stride, layer.padding)
        return F.linear(values, weight, own)

    right, stock, ours = multiplied(torch.float64), multiplied(x.dtype).double(), layer(x).double()
    norm = right.norm().clamp_min(_TINY)
    return float((ours - right).norm() / norm), float((stock - right).norm() / norm)
