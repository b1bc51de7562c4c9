"""Which rank has which rows of a picture, at every level of a UNet.

Each level is dealt out by itself, so that everybody has as much to do; where heights are even, borders of one level lie
on those of the next, and what a rank needs of its neighbours is a row. A picture of fewer rows at its coarsest level
than there are ranks leaves the last ranks without work.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from rocm_sd.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Rows", "deal", "shares"]


@dataclass(frozen=True)
class Rows:
    """`borders`: rank r has the rows from borders[r] to borders[r + 1]. `levels`: those of all levels."""

    borders: tuple[int, ...]
    level: int = 0
    levels: tuple[tuple[int, ...], ...] = ()

    @property
    def height(self) -> int:
        return self.borders[-1]

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(end - begin for begin, end in zip(self.borders, self.borders[1:], strict=False))

    def of(self, rank: int) -> tuple[int, int]:
        return self.borders[rank], self.borders[rank + 1]

    @property
    def coarser(self) -> Rows:
        """After a convolution that takes every other row."""
        if self.level + 1 < len(self.levels):
            return Rows(self.levels[self.level + 1], self.level + 1, self.levels)
        halves = tuple((border + 1) // 2 for border in self.borders)
        return Rows(halves, self.level + 1, (*self.levels[: self.level + 1], halves))

    @property
    def finer(self) -> Rows:
        """After an upsampling: the level that this one came from, or twice the rows where it came from none."""
        if self.level > 0:
            return Rows(self.levels[self.level - 1], self.level - 1, self.levels)
        doubled = tuple(2 * border for border in self.borders)
        return Rows(doubled, 0, (doubled, *self.levels))

    def among(self, ranks: int) -> Rows:
        """The same for the first ranks alone, where the others have none."""
        return Rows(self.borders[: ranks + 1], self.level, tuple(each[: ranks + 1] for each in self.levels))

    def of_height(self, height: int) -> Rows:
        """The level of this height, here or coarser."""
        for level in range(self.level, len(self.levels)):
            if self.levels[level][-1] == height:
                return Rows(self.levels[level], level, self.levels)
        raise Unsupported("patch", f"a tensor of {height} rows beside one of {self.height}")

    def needed(self, rank: int, rows: Rows, stride: int, kernel: int, padding: int) -> tuple[int, int]:
        """What a rank needs of these rows for its own of the result `rows`; beyond the picture there is nothing."""
        first, last = rows.of(rank)
        return max(0, first * stride - padding), min(self.height, (last - 1) * stride - padding + kernel)


def shares(count: int, weights: Sequence[float]) -> tuple[int, ...]:
    """So many things by weight, at least one each where there are enough; the first get what is left over."""
    ranks = len(weights)
    if count <= ranks:
        return tuple(int(rank < count) for rank in range(ranks))
    whole = sum(weights)
    given = [max(1, int(count * weight / whole)) for weight in weights]
    while sum(given) > count:
        given[max(range(ranks), key=lambda rank: given[rank])] -= 1
    # Whoever is furthest below its share takes the next one.
    while sum(given) < count:
        given[max(range(ranks), key=lambda rank: count * weights[rank] / whole - given[rank])] += 1
    return tuple(given)


def deal(height: int, depth: int, weights: Sequence[float]) -> Rows:
    """The rows of a picture for a model that halves them `depth` times."""
    heights = [height]
    for _ in range(depth):
        heights.append((heights[-1] + 1) // 2)
    working = [weight if rank < heights[-1] else 0.0 for rank, weight in enumerate(weights)]
    levels = tuple(_borders(height, working) for height in heights)
    return Rows(levels[0], 0, levels)


def _borders(height: int, weights: Sequence[float]) -> tuple[int, ...]:
    some = sum(weight > 0 for weight in weights)
    counts = (*shares(height, weights[:some]), *([0] * (len(weights) - some)))
    return tuple(accumulate(counts, initial=0))
