"""What one rank has computed, on others: its tensors by their shapes first, whatever else it holds in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from rocm_sd.parallel.ranks import Ranks

__all__ = ["Kind", "device_of", "hand_on", "kinds"]


@dataclass(frozen=True)
class Kind:
    """Of a tensor. `device`: its type alone, since a card has another number on each rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    def empty(self, own: torch.device) -> torch.Tensor:
        """`own`: the device of the rank that it is for."""
        return torch.empty(self.shape, dtype=self.dtype, device=self._place(own))

    def unread(self, own: torch.device) -> torch.Tensor:
        """Of this shape, and without memory of its own."""
        return torch.zeros((), dtype=self.dtype, device=self._place(own)).expand(self.shape)

    def _place(self, own: torch.device) -> torch.device:
        return own if own.type == self.device else torch.device(self.device)


def kinds(leaves: Sequence[Any]) -> list[Any]:
    return [
        Kind(tuple(leaf.shape), leaf.dtype, leaf.device.type) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ]


def device_of(given: Any) -> torch.device:
    """Where this rank computes a call, by the first tensor that it was given."""
    leaves = pytree.tree_leaves(given)
    return next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), torch.device("cpu"))


def hand_on(ranks: Ranks, answer: Any, owner: int, receivers: Collection[int], own: torch.device) -> Any:
    """The owner's answer, on it and on the receivers; others keep what they gave. Every rank calls this."""
    leaves, tree = pytree.tree_flatten(answer) if ranks.rank == owner else ([], None)
    said = ranks.agree((kinds(leaves), tree) if ranks.rank == owner else None)[owner]
    if ranks.rank == owner:
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                ranks.hand_over(dict.fromkeys(receivers, leaf), {})
        return answer
    if ranks.rank not in receivers:
        return answer
    got = []
    for kind in said[0]:
        leaf = kind.empty(own) if isinstance(kind, Kind) else kind
        if isinstance(kind, Kind):
            ranks.hand_over({}, {owner: leaf})
        got.append(leaf)
    return pytree.tree_unflatten(got, said[1])
