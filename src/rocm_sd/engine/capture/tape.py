"""What stands for a graph of launches where there is no GPU: the trace of a function's tensor operations.

Replayed, it reads the same memory and has the same Python values baked in as a graph of launches would have, so that
what makes one stale makes the other stale, and tests without a GPU see it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Tape", "launches"]

Tensors = list[torch.Tensor]
_Step = tuple[Any, list[Any], Any, list[tuple[int, int]], list[int | None]]


def launches(func: Any) -> bool:
    """Whether an operation may launch anything: a view launches nothing."""
    return not getattr(func, "is_view", False)


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each operation: what is a result of another one by number, everything else as the very object it was.

    A tenth of the cost of torch's own tracer, which makes a graph that could be compiled.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: list[_Step] = []
        self._numbers: dict[int, int] = {}
        # Held while tracing, or another tensor would come by the same identity.
        self._alive: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note(func, args, kwargs or {}, result)
        return result

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operation and what it gave; replayed, `func` is called again."""
        leaves, tree = pytree.tree_flatten((args, kwargs))
        places = [(at, self._numbers[id(leaf)]) for at, leaf in enumerate(leaves) if id(leaf) in self._numbers]
        known = {at for at, _ in places}
        outs = pytree.tree_leaves(result)
        self._alive += [*leaves, *outs]
        kept = [None if at in known else leaf for at, leaf in enumerate(leaves)]
        self._steps.append((func, kept, tree, places, [self._number(out) for out in outs]))

    def _number(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        return self._numbers.setdefault(id(value), len(self._numbers))

    def replayed(self, results: Tensors) -> tuple[Tensors, Callable[[], None]]:
        """Tensors that stay the same, and what fills them with the function's results by running it all again."""
        outputs, replay, _ = self._replayed(results, [self._steps])
        return outputs, replay

    def replayed_in_blocks(self, results: Tensors, most: int) -> tuple[Tensors, Callable[[], None], int]:
        """As above, cut after each `most` operations that may launch something; and how many blocks there are."""
        blocks: list[list[_Step]] = [[]]
        count = 0
        for step in self._steps:
            if launches(step[0]):
                if count >= most:
                    blocks.append([])
                    count = 0
                count += 1
            blocks[-1].append(step)
        return self._replayed(results, blocks)

    def _replayed(self, results: Tensors, blocks: list[list[_Step]]) -> tuple[Tensors, Callable[[], None], int]:
        wanted = [(self._numbers.get(id(result)), result) for result in results]
        self._alive.clear()

        def play() -> Tensors:
            # What crosses from one block to the next lies here, as in the memory that blocks of launches share.
            values: dict[int | None, Any] = {}
            for block in blocks:
                _play(block, values)
            return [result if number is None else values[number] for number, result in wanted]

        outputs = [output.clone() for output in play()]

        def replay() -> None:
            for output, value in zip(outputs, play(), strict=True):
                output.copy_(value)

        return outputs, replay, len(blocks)


def _play(steps: list[_Step], values: dict[int | None, Any]) -> None:
    for func, kept, tree, places, numbers in steps:
        leaves = list(kept)
        for at, number in places:
            leaves[at] = values[number]
        args, kwargs = pytree.tree_unflatten(leaves, tree)
        values.update(zip(numbers, pytree.tree_leaves(func(*args, **kwargs)), strict=True))
