from __future__ import annotations

from dataclasses import dataclass

from rocm_sd.kernels.config import Config
from rocm_sd.kernels.sizes import ceil_div

__all__ = ["AttentionConfig"]

# A key range shorter than this many blocks costs more to merge than it saves.
_LEAST_BLOCKS = 4


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
