"""Graphs in the order of their last use, within a bound on the memory that they hold together."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from rocm_sd.engine.memory import free_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    import torch

__all__ = ["GraphCache", "half_of_the_free_memory"]


class Held(Protocol):
    @property
    def memory(self) -> int: ...


Item = TypeVar("Item", bound=Held)

# Each graph also has nodes and buffers that no allocator counts.
_MOST = 32


def half_of_the_free_memory(device: torch.device) -> int:
    """Half is left to everything else; no bound where the free memory is not known."""
    free = free_memory(device)
    return 2**62 if free is None else free // 2


class GraphCache(Generic[Item]):
    """`bound` is asked each time something is put here: free memory comes and goes."""

    def __init__(self, bound: Callable[[], int]) -> None:
        self._bound = bound
        self._items: OrderedDict[Hashable, Item] = OrderedDict()
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items.values())

    @property
    def memory(self) -> int:
        return sum(item.memory for item in self)

    def get(self, key: Hashable) -> Item | None:
        item = self._items.get(key)
        if item is not None:
            self._items.move_to_end(key)
        return item

    def put(self, key: Hashable, item: Item) -> None:
        """The least recently used give way; the one that was just put here stays."""
        self._items[key] = item
        self._items.move_to_end(key)
        # What the items hold is not free, but would be without them: half of it is theirs, as of what is free.
        bound = self._bound() + self.memory // 2
        while len(self) > 1 and (len(self) > _MOST or self.memory > bound):
            self._items.popitem(last=False)
            self.dropped += 1

    def drop(self, key: Hashable) -> None:
        self._items.pop(key, None)

    def clear(self) -> None:
        self._items.clear()
