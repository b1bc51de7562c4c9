"""Executes AMD machine code (gfx11, gfx12, gfx94x) on a CPU, instruction by instruction, all waves at once.

>>> from rocm_sd.verify.emulator import Buffer, launch
>>> counters = launch(code, (blocks,), [Buffer(x), Buffer(y, must_write=True), n])

It finds what a test on real hardware can miss: out-of-bounds and misaligned accesses, reads of memory nothing wrote,
outputs left unwritten, loads that were not waited for, races in LDS and in global memory, divergent barriers and
deadlocks. It does not model time: delays that some instructions need after others (s_nop, s_delay_alu) and caches are
not checked. Results agree with independent statements in numpy; none was compared with real hardware.
"""

from __future__ import annotations

from rocm_sd.verify.emulator.counters import Counters
from rocm_sd.verify.emulator.dispatch import launch
from rocm_sd.verify.emulator.errors import (
    BudgetExceeded,
    Deadlock,
    DivergentBarrier,
    EmulationError,
    GlobalRace,
    LdsRace,
    MisalignedAccess,
    MissingWait,
    OutOfBounds,
    UninitialisedRead,
    UnknownInstruction,
    UnwrittenOutput,
)
from rocm_sd.verify.emulator.memory import Buffer

__all__ = [
    "BudgetExceeded",
    "Buffer",
    "Counters",
    "Deadlock",
    "DivergentBarrier",
    "EmulationError",
    "GlobalRace",
    "LdsRace",
    "MisalignedAccess",
    "MissingWait",
    "OutOfBounds",
    "UninitialisedRead",
    "UnknownInstruction",
    "UnwrittenOutput",
    "launch",
]
