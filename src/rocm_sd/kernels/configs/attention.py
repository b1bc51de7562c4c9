from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rocm_sd.kernels.config import Config
from rocm_sd.kernels.sizes import ceil_div, power_of_2

__all__ = ["AttentionConfig", "KeyLoop", "pieces"]

# How the last block of keys is met: it is whole, it follows the loop with a mask, or every block has one.
KeyLoop = Literal["whole", "tail", "masked"]

# A key range shorter than this many blocks costs more to merge than it saves.
_LEAST_BLOCKS = 4
_FEW_BLOCKS = 8


def pieces(d: int, most: int) -> tuple[int, int, int]:
    """Powers of two from 16 on that cover a head of `d`, at most `most` of them; 0 stands for none."""
    cut: list[int] = []
    left = -(-d // 16) * 16
    while left > 0:
        last = len(cut) == most - 1
        size = power_of_2(left) if last else 1 << (left.bit_length() - 1)
        cut.append(size)
        left -= size
    d0, d1, d2 = (*cut, 0, 0)[:3]
    return d0, d1, d2


@dataclass(frozen=True)
class AttentionConfig(Config):
    """Queries and keys of a tile, warps and load stages; the rest says how the work is cut.

    `pieces`: the most powers of two that a head is cut into; 1 pads it to the next power of two.
    `ahead`: 1 computes the scores of the next block before the softmax of this one.
    `chunk`: 0 keeps the queries; otherwise they are read again, so many columns at a time (`_attend_wide`).
    `columns`: output columns of a program of `_attend_wide`; each recomputes the scores.
    `programs_per_cu`: where fewer programs than that come about, the keys are divided; 0 never divides them.
    """

    block_m: int = 32
    block_n: int = 32
    warps: int = 4
    stages: int = 2
    pieces: int = 3
    ahead: int = 0
    chunk: int = 0
    columns: int = 0
    programs_per_cu: int = 1

    def key_ranges(self, heads: int, queries: int, keys: int, head: int, compute_units: int) -> tuple[int, int]:
        """(programs that share the keys of some queries, blocks of keys of each); `heads` are those of all items."""
        programs = heads * ceil_div(queries, self.block_m) * (ceil_div(head, self.columns) if self.chunk else 1)
        blocks = ceil_div(keys, self.block_n)
        wanted = compute_units * self.programs_per_cu // programs
        blocks_each = ceil_div(blocks, max(1, min(wanted, blocks // _LEAST_BLOCKS)))
        return ceil_div(blocks, blocks_each), blocks_each

    def key_loop(self, keys: int, head: int) -> KeyLoop:
        """The code of a masked tail takes registers from the loop before it: at head size 160 that is 71 spilled on
        gfx1100. A mask costs nothing where blocks are few, and little where each score takes many products.
        """
        if keys % self.block_n == 0:
            return "whole"
        return "masked" if self.chunk or head > 128 or ceil_div(keys, self.block_n) <= _FEW_BLOCKS else "tail"
