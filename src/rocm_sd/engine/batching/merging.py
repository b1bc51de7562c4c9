"""Several calls of a model as one: their tensors joined along the first dimension, and the answer cut apart again.

Each picture may be at another timestep: a denoiser takes one for each of its samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import nn

__all__ = ["Merged", "StepCall", "merged"]

_TIMESTEP = "timestep"


@dataclass(frozen=True, eq=False)
class StepCall:
    """A call of a model, by the names of its arguments. `key`: what it has to share with others to be run with them,
    or None; `samples`: how many it has.
    """

    named: dict[str, Any]
    key: Hashable | None
    samples: int

    @classmethod
    def of(cls, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepCall:
        named = _by_name(model, args, kwargs)
        if named is None:
            return cls({}, None, 1)
        sample = next((value for value in named.values() if isinstance(value, torch.Tensor) and value.dim() > 1), None)
        if sample is None or not len(sample):
            return cls(named, None, 1)
        if _TIMESTEP in named:
            times = _timesteps(named[_TIMESTEP], sample)
            if times is None:
                return cls(named, None, len(sample))
            named = {**named, _TIMESTEP: times}
        return cls(named, _key(named, len(sample)), len(sample))


@dataclass(frozen=True)
class Merged:
    """`named`: of the one call; `sizes`: how many samples each has; `padded`: how many were added at the end."""

    named: dict[str, Any]
    sizes: tuple[int, ...]
    padded: int

    def apart(self, answer: Any) -> list[Any]:
        """The answer to each; ValueError where it is not made of tensors with as many samples."""
        leaves, tree = pytree.tree_flatten(answer)
        count = sum(self.sizes) + self.padded
        if not leaves or not all(isinstance(leaf, torch.Tensor) and len(leaf) == count for leaf in leaves):
            raise ValueError(f"an answer that does not have {count} samples")
        parts = [torch.split(leaf, [*self.sizes, *([self.padded] if self.padded else [])]) for leaf in leaves]
        return [pytree.tree_unflatten([part[i] for part in parts], tree) for i in range(len(self.sizes))]


def merged(calls: Sequence[StepCall], count: int | None = None) -> Merged:
    """Of calls with one key. `count`: how many samples the one call is to have; the last one is repeated up to it."""
    sizes = tuple(call.samples for call in calls)
    padded = 0 if count is None else count - sum(sizes)
    flat = [pytree.tree_flatten(call.named) for call in calls]
    leaves = []
    for values in zip(*(leaves for leaves, _ in flat), strict=True):
        if not isinstance(values[0], torch.Tensor):
            leaves.append(values[0])
            continue
        more = [values[-1][-1:].expand(padded, *values[-1].shape[1:])] if padded else []
        leaves.append(torch.cat([*values, *more]))
    return Merged(pytree.tree_unflatten(leaves, flat[0][1]), sizes, padded)


def _timesteps(given: Any, sample: torch.Tensor) -> torch.Tensor | None:
    """One for each sample, as the time embedding will read it: schedulers have theirs in several dtypes."""
    if isinstance(given, (int, float)):
        return torch.full((len(sample),), float(given), dtype=torch.float32, device=sample.device)
    if not isinstance(given, torch.Tensor) or given.numel() not in {1, len(sample)}:
        return None
    return given.reshape(-1).to(sample.device, torch.float32).expand(len(sample))


def _key(named: dict[str, Any], samples: int) -> Hashable | None:
    leaves, tree = pytree.tree_flatten(named)
    kinds: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if not leaf.dim() or len(leaf) != samples:
                return None
            kinds.append((leaf.dtype, leaf.device, leaf.shape[1:]))
        elif leaf is None or isinstance(leaf, (bool, int, float, str)):
            kinds.append((type(leaf), leaf))
        else:
            return None
    return tuple(kinds), str(tree)


@lru_cache(maxsize=64)
def _signature(kind: Any) -> Signature:
    return signature(kind.forward)


def _by_name(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """None where they do not fit the forward, which will say so itself, or have no names there."""
    kind: Any = type(model)
    try:
        bound = _signature(kind).bind(model, *args, **kwargs).arguments
    except TypeError:
        return None
    parameters = _signature(kind).parameters
    own = next(iter(parameters))
    named = {name: value for name, value in bound.items() if name != own}
    plain = {Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY}
    return named if all(parameters[name].kind in plain for name in named) else None
