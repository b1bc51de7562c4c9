"""`cfg`: the entries of a batch, on different ranks: with guidance, one half has the prompt and the other has not.

| call of a model | what is split | what is sent |
|---|---|---|
| inputs with an entry for each picture | by entries, before the call | nothing |
| the answer | | own entries, to all |

The model itself runs as it does alone, on fewer entries: with its rules, and from its graphs. What is sent, is sent
between two graphs. A call of one entry, or one that might need the whole batch, runs whole on every rank.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from rocm_sd.engine import Installed, divide
from rocm_sd.parallel.rows import shares
from rocm_sd.rewrite import forwards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from rocm_sd.parallel.ranks import Ranks

__all__ = ["install_batch"]


def install_batch(model: nn.Module, ranks: Ranks, weights: Sequence[float]) -> Installed:
    kind, split, whole_calls = type(model).__name__, Counter[int](), Counter[str]()

    def answer(model: nn.Module, whole: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        divided = divide(model, args, kwargs)
        if divided.reason is not None:
            whole_calls[divided.reason] += 1
            return whole(*args, **kwargs)
        split[divided.batch] += 1
        counts = shares(divided.batch, weights)
        borders = list(accumulate(counts, initial=0))
        # With more ranks than entries the last ones compute the first entry, and nobody asks for it.
        mine = slice(borders[ranks.rank], borders[ranks.rank + 1]) if counts[ranks.rank] else slice(0, 1)
        leaves, tree = pytree.tree_flatten(divided.run(whole, mine))
        own = counts[ranks.rank]
        leaves = [ranks.gather(leaf[:own], counts, 0) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return pytree.tree_unflatten(leaves, tree)

    take_off = forwards.surround(model, answer)

    def notes() -> Iterator[str]:
        yield f"{kind} computes entries of a batch on each of {ranks.size} ranks: {split.total()} calls so far"
        for why, calls in whole_calls.items():
            yield f"{kind} ran {calls} calls whole, because {why}"

    return Installed(lambda: tuple(notes()), take_off)
