"""A call taken apart: its tensors, and everything else about it, by which two calls are of one kind or are not."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.engine.capture.snapshot import global_state
from rocm_sd.engine.convolutions import flags_set_by_hand

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

__all__ = ["FlatCall", "flatten"]


@dataclass(frozen=True)
class FlatCall:
    """`shape`: how lists, tuples and dicts lie in one another around the leaves."""

    tensors: list[torch.Tensor]
    leaves: list[Any] = field(repr=False)
    shape: Any = field(repr=False)
    key: Hashable = field(repr=False)

    def with_tensors(self, tensors: list[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same call, of other tensors."""
        given = iter(tensors)
        leaves = iter([next(given) if isinstance(leaf, _Place) else leaf for leaf in self.leaves])
        args, kwargs = _built(self.shape, leaves)
        return args, kwargs

    def without_tensors(self) -> FlatCall:
        """For whoever keeps the call, and must not keep its tensors."""
        return replace(self, tensors=[])


class _Place:
    """Where a tensor was."""


def flatten(
    args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, also: Hashable = None
) -> FlatCall | None:
    """None where something in the call is neither a tensor on the device nor a value that can be compared.

    `also`: what else two calls of one kind have in common.
    """
    leaves: list[Any] = []
    shape = _shape((args, kwargs), leaves)
    tensors: list[torch.Tensor] = []
    kinds: list[Any] = []
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            # A timestep may be on the CPU: stock moves it.
            if type(leaf) is not torch.Tensor or (leaf.device != device and leaf.dim()) or leaf.requires_grad:
                return None
            tensors.append(leaf)
            kinds.append((leaf.dtype, leaf.shape))
            leaves[number] = _Place()
        elif leaf is None or isinstance(leaf, (bool, int, float, str)):
            kinds.append((type(leaf), leaf))
        else:
            return None
    key = (shape, tuple(kinds), global_state(), flags_set_by_hand(), also)
    return FlatCall(tensors, leaves, shape, key) if tensors else None


def _shape(value: Any, leaves: list[Any]) -> Any:
    kind = type(value)
    if kind is dict:
        return (dict, *((name, _shape(part, leaves)) for name, part in value.items()))
    if kind is list or kind is tuple:
        return (kind, *(_shape(part, leaves) for part in value))
    leaves.append(value)
    return None


def _built(shape: Any, leaves: Iterator[Any]) -> Any:
    if shape is None:
        return next(leaves)
    kind, *parts = shape
    if kind is dict:
        return {name: _built(part, leaves) for name, part in parts}
    return kind(_built(part, leaves) for part in parts)
