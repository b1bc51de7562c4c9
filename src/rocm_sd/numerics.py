"""The numerics gate: a result is right when it is as close to float64 as stock torch is.

allowed = 2 * error of stock torch in the same dtype + floor, for the largest and for the root-mean-square error.
The floor is one rounding of the largest exact value: what is left when stock happens to be exact. What is rounded to 8
bits has none: it is the definition's own value, or another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rocm_sd.errors import NumericsFailure

__all__ = ["Comparison", "compare", "in_float64", "outputs", "require"]


@dataclass(frozen=True)
class Comparison:
    """Errors against float64: ours, stock torch's, and what is allowed."""

    largest: float
    rms: float
    stock_largest: float
    stock_rms: float
    floor: float

    @property
    def allowed_largest(self) -> float:
        return 2 * self.stock_largest + self.floor

    @property
    def allowed_rms(self) -> float:
        return 2 * self.stock_rms + self.floor

    @property
    def ok(self) -> bool:
        # Written so that NaN, which compares false, fails.
        return self.largest <= self.allowed_largest and self.rms <= self.allowed_rms

    def __str__(self) -> str:
        return (
            f"largest error {self.largest:.3g} (stock {self.stock_largest:.3g}, allowed {self.allowed_largest:.3g}), "
            f"rms {self.rms:.3g} (stock {self.stock_rms:.3g}, allowed {self.allowed_rms:.3g})"
        )


def _errors(actual: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    difference = actual.to(torch.float64) - exact
    if not difference.numel():
        return 0.0, 0.0
    return float(difference.abs().max()), float(difference.square().mean().sqrt())


def compare(actual: torch.Tensor, exact: torch.Tensor, stock: torch.Tensor) -> Comparison:
    """`exact` is the reference on the same inputs in float64; `stock` is stock torch in `actual`'s dtype."""
    if actual.shape != exact.shape or stock.shape != exact.shape:
        shapes = f"{tuple(actual.shape)}, {tuple(stock.shape)} and {tuple(exact.shape)}"
        raise NumericsFailure(f"Results of different shapes cannot be compared: {shapes}.")
    exact = exact.to(torch.float64)
    scale = float(exact.abs().max()) if exact.numel() else 0.0
    floor = 0.0 if actual.element_size() == 1 else scale * torch.finfo(actual.dtype).eps
    return Comparison(*_errors(actual, exact), *_errors(stock, exact), floor)


def require(name: str, actual: torch.Tensor, exact: torch.Tensor, stock: torch.Tensor) -> Comparison:
    comparison = compare(actual, exact, stock)
    if not comparison.ok:
        raise NumericsFailure(f"{name} differs from the reference: {comparison}.")
    return comparison


def in_float64(arguments: tuple[Any, ...]) -> list[Any]:
    """The same call, exact: every floating tensor of the arguments in float64."""
    return [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments]


def outputs(result: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
