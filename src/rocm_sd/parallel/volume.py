"""How many bytes a rank sends in one call of a model, by strategy: from the model's config, with nothing run.

B entries of a batch, C channels, H x W pixels, e bytes a value, n ranks; rows are those that `rows.deal` gives a rank.

| strategy | what a rank sends | bytes |
|---|---|---|
| `data` | nothing | 0 |
| `cfg` | its entries of the answer, to all | (n - 1) e (entries) C H W |
| `patch` | for a convolution of k rows: what its neighbours need of its own | e B C W a row |
| | for a group norm of G groups: mean, squares and count, to all | (n - 1) 4 x 3 B G |
| | for self-attention: keys and values of its rows, to all | (n - 1) e 2 B C (rows) W |
| | its rows of the answer, to all | (n - 1) e B C (rows) W |
| `tensor` | its part of a sum: each attention, each feed-forward layer, as float32 | 2 (n - 1) / n 4 B C H W |
| `pipeline` | the sample where its blocks end, and what blocks of others read of its own | e B C H W |
| | the answer, from the rank of the last block to all | (n - 1) e B C H W |

A gather is of equal parts: they count as many rows or entries as the rank has that has the most. `Traffic` counts the
same in a run; tests compare the two, with `CountedRanks` for models of the real size, and between processes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rocm_sd.errors import require_one_of
from rocm_sd.parallel.ranks import Ranks, Traffic
from rocm_sd.parallel.rows import shares
from rocm_sd.parallel.stages import ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

    from rocm_sd.parallel.layers import Call, Layer
    from rocm_sd.parallel.rows import Rows

__all__ = ["STRATEGIES", "CountedRanks", "Sent", "Volume", "is_split", "stages", "volume"]

STRATEGIES = ("data", "cfg", "patch", "tensor", "pipeline")
# What is summed, or is a sum, is at least of float32.
_WIDE = 4


@dataclass(frozen=True)
class Sent:
    """One exchange: how much of it is from this rank, in how many tensors, as `Traffic` counts them.

    Nothing where it only receives.
    """

    what: str
    bytes: int
    times: int = 1


@dataclass(frozen=True)
class Volume:
    """The exchanges of one call, in their order."""

    sent: tuple[Sent, ...]

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.sent)

    @property
    def times(self) -> int:
        return sum(each.times for each in self.sent)

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes by what for."""
        found = Counter[str]()
        for each in self.sent:
            found[each.what] += each.bytes
        return dict(found)


def volume(call: Call, strategy: str, size: int, rank: int = 0) -> Volume:
    """What `rank` of `size` sends in this call, where all have the same share of the work."""
    require_one_of("strategy", strategy, STRATEGIES)
    return Volume(tuple(_RULES[strategy](call, size, rank)) if size > 1 else ())


def is_split(layer: Layer, size: int) -> bool:
    """Whether `tensor` splits it: an attention with fewer heads than ranks runs whole."""
    return layer.kind == "feed_forward" or (layer.kind == "attention" and layer.heads >= size)


def stages(call: Call, size: int) -> dict[str, int]:
    """Which rank of a `pipeline` has which block."""
    costs = [sum(layer.parameters for layer in layers) for layers in call.blocks.values()]
    return dict(zip(call.blocks, ranges(costs, [1.0] * size), strict=True))


def _data(_call: Call, _size: int, _rank: int) -> Iterator[Sent]:
    return iter(())


def _cfg(call: Call, size: int, _rank: int) -> Iterator[Sent]:
    # One entry alone is computed by everybody.
    if call.batch > 1:
        most = max(shares(call.batch, [1.0] * size))
        yield Sent("answer", (size - 1) * most * call.out * call.pixels(call.last) * call.itemsize)


def _patch(call: Call, size: int, rank: int) -> Iterator[Sent]:
    levels = call.rows(size)
    working = len(levels[0].counts)
    others = working - 1
    if rank >= working:
        return
    for layer in call.layers if others else ():
        rows = levels[layer.level]
        a_row = call.batch * layer.channels * call.widths[layer.level] * call.itemsize
        if layer.kind == "conv" and layer.kernel > 1:
            result = levels[layer.level + (layer.stride > 1)]
            yield from _halo(rows, rank, a_row, _needed(rows, result, layer))
        elif layer.kind == "upsample":
            result = levels[layer.level + (-1 if call.depth > 0 else 1)]
            yield from _halo(rows, rank, a_row, _nearest(rows, result))
        elif layer.kind == "norm":
            yield Sent("statistics", others * 3 * call.batch * layer.groups * max(call.itemsize, _WIDE))
        elif layer.kind == "attention" and layer.context is None:
            yield Sent("keys and values", others * 2 * max(rows.counts) * a_row)
    a_row = call.batch * call.out * call.widths[call.last] * call.itemsize
    if others:
        yield Sent("answer", others * max(levels[call.last].counts) * a_row)
    if rank == 0 and working < size:
        # To those that have no rows.
        yield Sent("answer", (size - working) * call.heights[call.last] * a_row, size - working)


def _needed(rows: Rows, result: Rows, layer: Layer) -> Callable[[int], tuple[int, int]]:
    return lambda rank: rows.needed(rank, result, layer.stride, layer.kernel, layer.kernel // 2)


def _nearest(rows: Rows, result: Rows) -> Callable[[int], tuple[int, int]]:
    def source(row: int) -> int:
        return min(rows.height - 1, row * rows.height // result.height)

    return lambda rank: (source(result.of(rank)[0]), source(result.of(rank)[1] - 1) + 1)


def _halo(rows: Rows, rank: int, a_row: int, wanted: Callable[[int], tuple[int, int]]) -> Iterator[Sent]:
    def common(some: tuple[int, int], others: tuple[int, int]) -> int:
        return max(0, min(some[1], others[1]) - max(some[0], others[0]))

    neighbours = [other for other in range(len(rows.counts)) if other != rank]
    given = [common(rows.of(rank), wanted(other)) for other in neighbours]
    taken = [common(rows.of(other), wanted(rank)) for other in neighbours]
    if any(given) or any(taken):
        yield Sent("halo", sum(given) * a_row, sum(count > 0 for count in given))


def _tensor(call: Call, size: int, _rank: int) -> Iterator[Sent]:
    for layer in call.layers:
        if is_split(layer, size):
            values = call.batch * call.pixels(layer.level) * layer.channels
            yield Sent("sum", 2 * (size - 1) * values * max(call.itemsize, _WIDE) // size)


def _pipeline(call: Call, size: int, rank: int) -> Iterator[Sent]:
    owners = stages(call, size)
    following = dict(pairwise(owners))

    def whole(what: str, level: int, channels: int) -> Sent:
        # Entry by entry.
        return Sent(what, call.batch * channels * call.pixels(level) * call.itemsize, call.batch)

    for block in (block for block, owner in owners.items() if owner == rank):
        if block in following and owners[following[block]] != rank:
            yield whole("sample", *call.result(block))
        for kept_by, reader, level, channels in call.skips:
            if kept_by == block and owners[reader] != rank:
                yield whole("skip", level, channels)
    if rank == max(owners.values()):
        answer = call.batch * call.out * call.pixels(call.last) * call.itemsize
        yield Sent("answer", (size - 1) * answer, size - 1)


_RULES: dict[str, Callable[[Call, int, int], Iterator[Sent]]] = {
    "data": _data,
    "cfg": _cfg,
    "patch": _patch,
    "tensor": _tensor,
    "pipeline": _pipeline,
}


class CountedRanks(Ranks):
    """Stands in for one of `size` ranks, with nobody else there: what it sends is counted, and goes nowhere.

    For models on the meta device, which has shapes and no memory. What is received has the right shape. `said`: what
    somebody else would answer, in the order in which it is asked for; without it everybody says the same as this rank.
    """

    def __init__(self, name: str, size: int, rank: int = 0, said: Iterator[Any] | None = None) -> None:
        super().__init__(name, None, Traffic())
        self.size, self.rank, self._said = size, rank, said

    def hand_over(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:  # noqa: ARG002
        for tensor in outgoing.values():
            self.traffic.count(self.name, tensor)

    def send(self, tensor: torch.Tensor, to: int) -> Callable[[], None]:  # noqa: ARG002
        self.traffic.count(self.name, tensor)
        return lambda: None

    def first(self, count: int) -> CountedRanks | None:
        if count >= self.size:
            return self
        if self.rank >= count:
            return None
        fewer = CountedRanks(self.name, count, self.rank, self._said)
        fewer.traffic = self.traffic
        return fewer

    def agree(self, mine: Any) -> list[Any]:
        return [mine if self._said is None else next(self._said)] * self.size

    def _try(self, call: Callable[[], object]) -> None:
        """Nobody is there to be called."""
