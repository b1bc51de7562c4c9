"""What blocks need of the prompt, of the timestep and of their weights, worked out before the blocks run.

The projections of the time embedding depend on the timestep alone, the keys and values of the text on the prompt
alone, and the summed weights of an upsampler on its weights alone: the engine computes them once per run and hands
them over here while it runs or captures a model. The rules ask; where nothing was handed over, they compute it.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

__all__ = ["Conditioning", "TimeAdd", "given", "keys_values", "parity_weight", "time_add"]


@dataclass(frozen=True)
class TimeAdd:
    """[B, C], to be added after a block's first convolution; with that convolution's bias in it where `with_bias`."""

    value: torch.Tensor
    with_bias: bool


@dataclass(frozen=True)
class Conditioning:
    """For each block its time embedding's add, for each attention its keys and values, [B, S, H, D], and for each
    upsampler's convolution its summed weights; `asked_for`: those that were not here.
    """

    adds: dict[nn.Module, TimeAdd] = field(default_factory=dict)
    keys_values: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    parity_weights: dict[nn.Module, torch.Tensor] = field(default_factory=dict)
    asked_for: list[nn.Module] = field(default_factory=list)


_GIVEN: ContextVar[Conditioning | None] = ContextVar("rocm_sd_conditioning", default=None)


@contextmanager
def given(conditioning: Conditioning) -> Iterator[None]:
    token = _GIVEN.set(conditioning)
    try:
        yield
    finally:
        _GIVEN.reset(token)


def _given() -> Conditioning | None:
    # torch.compile traces no context variable.
    return None if torch.compiler.is_compiling() else _GIVEN.get()


def time_add(block: nn.Module) -> TimeAdd | None:
    conditioning = _given()
    return None if conditioning is None else conditioning.adds.get(block)


def keys_values(attention: nn.Module) -> tuple[torch.Tensor, torch.Tensor] | None:
    conditioning = _given()
    return None if conditioning is None else conditioning.keys_values.get(attention)


def parity_weight(convolution: nn.Module) -> torch.Tensor | None:
    conditioning = _given()
    if conditioning is None:
        return None
    found = conditioning.parity_weights.get(convolution)
    if found is None:
        conditioning.asked_for.append(convolution)
    return found
