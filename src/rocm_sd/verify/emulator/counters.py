"""What a profiler would count, from the emulator: instructions by class, memory traffic, bank conflicts, matrix work.

Counts are exact for the executed code. `modelled_cycles` is a model with stated constants and no claim to more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from rocm_sd.arch import MatrixUnit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rocm_sd.arch import Arch

__all__ = ["CACHE_LINE", "CLASSES", "LDS_BANKS", "Counters", "bank_conflicts", "cache_lines"]

CLASSES = (
    "salu", "valu", "trans", "matrix", "vmem_load", "vmem_store", "smem", "lds_load", "lds_store", "branch", "wait",
    "barrier", "other",
)  # fmt: skip

# RDNA3, RDNA4 and CDNA3 caches all work on lines of 128 bytes (AMD's RDNA and CDNA 3 white papers).
CACHE_LINE = 128
LDS_BANKS = 32
_NOBODY = np.iinfo(np.int64).min

# Issue cycles of one wave instruction on its SIMD, by class. RDNA has 32 lanes a SIMD and a quarter of that for
# transcendental functions; CDNA has 16, so that a wave of 64 takes four passes, and sixteen for transcendental ones.
_ISSUE_RDNA = {"salu": 1, "valu": 1, "trans": 4, "smem": 1, "lds_load": 1, "lds_store": 1, "branch": 1}
_ISSUE_CDNA = {"salu": 1, "valu": 4, "trans": 16, "smem": 1, "lds_load": 4, "lds_store": 4, "branch": 1}
# A cache line that a CU asks of its first cache takes about one cycle on the way there.
_CYCLES_PER_LINE = 1
# Dense 16-bit multiply-adds a SIMD does in one cycle, times two (AMD's tables of operations per clock and CU, divided
# by the SIMDs): 512 / 2 on RDNA3, 1024 / 2 on RDNA4, 2048 / 4 on CDNA3.
_MATRIX_FLOPS = {MatrixUnit.WMMA_GFX11: 256, MatrixUnit.WMMA_GFX12: 512, MatrixUnit.MFMA: 512}


@dataclass
class Counters:
    """Dynamic counts of one launch."""

    arch: Arch
    wave_size: int
    workgroups: int = 0
    waves: int = 0
    wave_instructions: int = 0
    by_class: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0))
    by_name: dict[str, int] = field(default_factory=dict)
    bytes_loaded: int = 0
    bytes_stored: int = 0
    lines_loaded: int = 0
    lines_stored: int = 0
    lds_accesses: int = 0
    lds_bank_conflicts: int = 0
    matrix_flops: int = 0
    seconds: float = 0.0

    def clear(self) -> None:
        """Begin at zero again."""
        vars(self).update(vars(Counters(self.arch, self.wave_size)))

    @property
    def coalescing_efficiency(self) -> float:
        """Bytes asked for, divided by the bytes of the cache lines they lie in."""
        lines = self.lines_loaded + self.lines_stored
        return (self.bytes_loaded + self.bytes_stored) / (lines * CACHE_LINE) if lines else 1.0

    def modelled_cycles(self) -> float:
        """A MODEL, not a measurement: busy cycles of the busiest unit if the launch ran alone on one compute unit.

        Vector, matrix, LDS and memory pipes work side by side; each is charged its issue cycles, divided over the SIMDs
        of the CU where it is private to a SIMD. Latency, dependencies, occupancy and cache misses are not modelled, so
        this ranks variants of one kernel by work and is a lower bound, not a forecast.
        """
        simds = self.arch.simds_per_cu or 1
        issue = _ISSUE_CDNA if self.wave_size == 64 else _ISSUE_RDNA
        vector = sum(self.by_class[name] * issue[name] for name in ("valu", "trans", "salu", "branch")) / simds
        flops = _MATRIX_FLOPS.get(self.arch.matrix_unit or MatrixUnit.NONE)
        matrix = self.matrix_flops / (flops * simds) if flops else 0.0
        lds = self.lds_accesses * issue["lds_load"] + self.lds_bank_conflicts
        memory = (self.lines_loaded + self.lines_stored) * _CYCLES_PER_LINE
        return float(max(vector, matrix, lds, memory))

    def matrix_utilisation(self) -> float:
        """Share of the modelled cycles in which the matrix unit works; a model like `modelled_cycles`."""
        flops = _MATRIX_FLOPS.get(self.arch.matrix_unit or MatrixUnit.NONE)
        cycles = self.modelled_cycles()
        return self.matrix_flops / (flops * (self.arch.simds_per_cu or 1) * cycles) if flops and cycles else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a report."""
        return {
            "arch": self.arch.name,
            "wave_size": self.wave_size,
            "workgroups": self.workgroups,
            "waves": self.waves,
            "wave_instructions": self.wave_instructions,
            "by_class": {name: count for name, count in self.by_class.items() if count},
            "bytes_loaded": self.bytes_loaded,
            "bytes_stored": self.bytes_stored,
            "cache_lines_loaded": self.lines_loaded,
            "cache_lines_stored": self.lines_stored,
            "coalescing_efficiency": round(self.coalescing_efficiency, 4),
            "lds_accesses": self.lds_accesses,
            "lds_bank_conflicts": self.lds_bank_conflicts,
            "matrix_flops": self.matrix_flops,
            "modelled_cycles": self.modelled_cycles(),
            "modelled_matrix_utilisation": round(self.matrix_utilisation(), 4),
        }


def bank_conflicts(addresses: NDArray[Any], active: NDArray[np.bool_], dwords: int) -> int:
    """Extra cycles of one LDS instruction, over all waves given: addresses in bytes [W, L].

    The unit serves 128 bytes a cycle from 32 banks of 4 bytes: lanes are taken in groups that ask for 128 bytes, and a
    group takes as many cycles as the busiest bank has different words to give.
    """
    lanes = addresses.shape[1]
    words = addresses.astype(np.int64) >> 2
    # Where all words move together the banks only rotate: waves have one pattern, or as many as a workgroup has waves.
    words -= words[:, :1]
    masks = np.packbits(active, axis=1)
    conflicts = 0
    while len(words):
        alike = (words == words[0]).all(axis=1) & (masks == masks[0]).all(axis=1)
        of_one = _wave_conflicts(words[0].tobytes(), masks[0].tobytes(), lanes, dwords)
        conflicts += of_one * int(np.count_nonzero(alike))
        words, masks = words[~alike], masks[~alike]
    return conflicts


@lru_cache(maxsize=4096)
def _wave_conflicts(pattern: bytes, mask: bytes, lanes: int, dwords: int) -> int:
    """Of one wave: 4-byte words that its lanes begin at, as int64, and which lanes are active, a bit each."""
    per_group = LDS_BANKS // (4 if dwords == 3 else dwords)
    words = np.frombuffer(pattern, np.int64)[:, None] + np.arange(dwords)
    active = np.unpackbits(np.frombuffer(mask, np.uint8), count=lanes).view(np.bool_)
    words = np.where(active[:, None], words, _NOBODY).reshape(lanes // per_group, per_group * dwords)
    words.sort(axis=1)
    different = np.ones(words.shape, np.bool_)
    different[:, 1:] = words[:, 1:] != words[:, :-1]
    different &= words != _NOBODY
    rows = np.broadcast_to(np.arange(len(words))[:, None], words.shape)
    cell = (rows * LDS_BANKS + (words & (LDS_BANKS - 1)))[different]
    busiest = np.bincount(cell, minlength=len(words) * LDS_BANKS).reshape(-1, LDS_BANKS).max(axis=1)
    return int(np.maximum(busiest - 1, 0).sum())


def cache_lines(addresses: NDArray[Any], active: NDArray[np.bool_], size: int) -> int:
    """Cache lines touched by one instruction, added up over the waves: addresses in bytes [W, L]."""
    shift = CACHE_LINE.bit_length() - 1
    signed = addresses.astype(np.int64)
    first, last = signed >> shift, (signed + (size - 1)) >> shift
    if np.count_nonzero(first != last):
        first, active = np.concatenate([first, last], axis=1), np.concatenate([active, active], axis=1)
    elif np.count_nonzero(active) == active.size and not np.count_nonzero(first[:, 1:] < first[:, :-1]):
        # In order already, as lanes mostly are.
        return int(np.count_nonzero(first[:, 1:] != first[:, :-1])) + len(first)
    lines = np.where(active, first, _NOBODY)
    lines.sort(axis=1)
    count = int((lines[:, 1:] != lines[:, :-1]).sum()) + len(lines)
    return count - int((lines[:, 0] == _NOBODY).sum())
