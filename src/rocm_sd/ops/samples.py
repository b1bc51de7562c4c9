"""Calls to try an op on: made anew each time, on any device, random or unfilled where only the shapes count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Draw", "Sample", "dtype_name"]


class Draw:
    """Tensors for one sample: `draw(2, 320, 64, 64)` is standard normal; the same seed gives the same values."""

    def __init__(self, dtype: torch.dtype, device: torch.device, filled: bool, seed: int) -> None:
        self.dtype, self.device, self.filled = dtype, device, filled
        self._random = torch.Generator(device).manual_seed(seed)

    def __call__(
        self, *shape: int, mean: float = 0.0, std: float = 1.0, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        dtype = dtype or self.dtype
        if not self.filled:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return (torch.randn(shape, generator=self._random, device=self.device) * std + mean).to(dtype)

    def image(self, *shape: int, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
        """[N, C, H, W], channels-last."""
        N, C, H, W = shape
        return self(N, H, W, C, mean=mean, std=std).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Sample:
    """One call: `build(draw)` gives the op's own arguments, in the order that its implementations take."""

    name: str
    dtype: torch.dtype
    build: Callable[[Draw], tuple[Any, ...]]

    def make(self, device: torch.device | str = "cpu", *, filled: bool = True, seed: int = 0) -> tuple[Any, ...]:
        return self.build(Draw(self.dtype, torch.device(device), filled, seed))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
