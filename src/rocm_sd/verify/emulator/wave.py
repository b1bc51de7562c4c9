"""The registers of a group of waves that stand at the same instruction, and the loads they still wait for.

`v[number, wave, lane]` and `s[number, wave]` are uint32. The scalar file is indexed by operand code, so that VCC (106),
the trap registers (108), M0 and EXEC (126) are rows of it. EXEC is kept a second time as a boolean array, because every
vector instruction asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from rocm_sd.verify.emulator.errors import MissingWait

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ACC_BASE", "EXEC", "SGPR_BIT", "VCC", "Group", "Outstanding", "sgpr_bits", "vgpr_bits"]

VCC, EXEC = 106, 126
# Accumulation registers of CDNA follow the 256 vector registers in one file.
ACC_BASE = 256
# A pending register is a bit of one Python integer: two for each vector register (its 16-bit halves are loaded apart),
# and one for each scalar register after those.
SGPR_BIT = 2 * 512


def vgpr_bits(number: int, count: int = 1, half: int | None = None) -> int:
    if half is not None:
        return 1 << (2 * number + half)
    return ((1 << 2 * count) - 1) << 2 * number


def sgpr_bits(number: int, count: int = 1) -> int:
    return ((1 << count) - 1) << (SGPR_BIT + number)


@lru_cache(maxsize=64)
def _everyone(width: int, lanes: int) -> NDArray[np.bool_]:
    """A full EXEC: one array for all groups of a size, so that what is known of a mask is known by identity."""
    mask = np.ones((width, lanes), np.bool_)
    mask.flags.writeable = False
    return mask


@dataclass(eq=False, slots=True)
class Outstanding:
    """A memory instruction that was issued and not waited for. `waves` is None where it holds for the whole group."""

    name: str
    address: int
    registers: int
    in_order: bool
    waves: NDArray[np.bool_] | None = None
    lds_bytes: Any = None


class Group:
    """Waves at one program counter. Splitting and merging copy registers; all else works on every wave at once."""

    def __init__(
        self,
        v: NDArray[np.uint32],
        s: NDArray[np.uint32],
        scc: NDArray[np.bool_],
        waves: NDArray[np.int64],
        waves_per_workgroup: int,
        pc: int,
    ) -> None:
        self.v, self.s, self.scc = v, s, scc
        self.vf, self.vi = v.view(np.float32), v.view(np.int32)
        self.waves = waves
        self.waves_per_workgroup = waves_per_workgroup
        self.workgroups = waves // waves_per_workgroup
        self.wave_in_workgroup = waves % waves_per_workgroup
        self.pc = pc
        self.width, self.lanes = v.shape[1], v.shape[2]
        self.queues: dict[str, list[Outstanding]] = {}
        self.pending = 0
        self.signalled = np.zeros(self.width, np.bool_)
        # LDS accesses that a split barrier does not order: those not finished when it was signalled, and later ones.
        self.carried: list[Any] = []
        # Factors of matrix instructions, each with the registers that it was made of.
        self.factors: dict[Any, Any] = {}
        self._everyone = _everyone(self.width, self.lanes)
        self.exec = self._everyone
        self.full = True
        self.exec_changed()

    @cached_property
    def by_lane(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of every lane the workgroup, and the number of the wave in it."""
        return np.repeat(self.workgroups, self.lanes), np.repeat(self.wave_in_workgroup, self.lanes)

    def exec_changed(self) -> None:
        rows = self.s[EXEC : EXEC + self.lanes // 32]
        self.full = bool((rows == 0xFFFFFFFF).all())
        self.exec = self._everyone if self.full else self.mask(EXEC)

    def mask(self, row: int) -> NDArray[np.bool_]:
        """The bits of one (wave32) or two (wave64) scalar registers, one for each lane."""
        if self.lanes == 32:
            raw = self.s[row].view(np.uint8).reshape(-1, 4)
        else:
            raw = np.ascontiguousarray(self.s[row : row + 2].T).view(np.uint8)
        return np.unpackbits(raw, axis=1, bitorder="little").view(np.bool_)

    def set_mask(self, row: int, mask: NDArray[np.bool_]) -> None:
        packed = np.packbits(mask, axis=1, bitorder="little")
        if self.lanes == 32:
            self.s[row] = packed.view(np.uint32)[:, 0]
        else:
            self.s[row : row + 2] = packed.view(np.uint32).T
        if row == EXEC:
            self.exec_changed()

    def issue(self, counter: str, entry: Outstanding) -> None:
        self.queues.setdefault(counter, []).append(entry)
        self.pending |= entry.registers
        if entry.lds_bytes and self.signalled.any():
            self.carried += entry.lds_bytes

    def wait(self, counter: str, allowed: int) -> None:
        """Loads of one kind return in order: at most the `allowed` newest are left. Scalar loads come in any order."""
        queue = self.queues.get(counter)
        if not queue or (allowed and len(queue) <= allowed and all(e.waves is None for e in queue)):
            return
        if allowed == 0:
            queue.clear()
        else:
            ordered = [e for e in queue if e.in_order]
            free = [e for e in queue if not e.in_order]
            uniform = all(e.waves is None for e in ordered)
            ordered = ordered[-allowed:] if uniform else self._retire(ordered, allowed)
            queue[:] = [e for e in queue if e in ordered or e in free]
        self.pending = 0
        for waiting in self.queues.values():
            for entry in waiting:
                self.pending |= entry.registers

    def _retire(self, queue: list[Outstanding], allowed: int) -> list[Outstanding]:
        newer = np.zeros(self.width, np.int64)
        kept = []
        for entry in reversed(queue):
            mine = np.ones(self.width, np.bool_) if entry.waves is None else entry.waves
            left = mine & (newer < allowed)
            newer += mine
            if left.any():
                entry.waves = left
                kept.append(entry)
        return kept[::-1]

    def check(self, touched: int, name: str, address: int, refilled: tuple[str, int] = ("", 0)) -> None:
        """Raise for the first register that is used before its load was waited for.

        `refilled`: a counter, and registers that may be filled again while a load of that counter fills them, because
        the later load is also the later one to write.
        """
        for counter, queue in self.queues.items():
            for entry in queue:
                both = entry.registers & touched
                if both and counter == refilled[0] and entry.in_order:
                    both &= ~refilled[1]
                if both:
                    raise MissingWait(
                        f"{name} uses {_register(both)} while {entry.name} at {entry.address:#x} is still filling it: "
                        f"no wait for {counter} stands between them.",
                        address=address,
                    )

    def split(self, chosen: NDArray[np.bool_]) -> tuple[Group, Group]:
        return self._take(chosen), self._take(~chosen)

    def _take(self, chosen: NDArray[np.bool_]) -> Group:
        place = np.flatnonzero(chosen)
        part = Group(
            np.ascontiguousarray(self.v[:, place]),
            np.ascontiguousarray(self.s[:, place]),
            self.scc[place],
            self.waves[place],
            self.waves_per_workgroup,
            self.pc,
        )
        part.carried = list(self.carried)
        for counter, queue in self.queues.items():
            for entry in queue:
                waves = None if entry.waves is None else entry.waves[place]
                if waves is not None and not waves.any():
                    continue
                if waves is not None and waves.all():
                    waves = None
                part.issue(counter, replace(entry, waves=waves))
        part.signalled = self.signalled[place]
        return part

    @staticmethod
    def merge(first: Group, second: Group) -> Group:
        both = Group(
            np.concatenate([first.v, second.v], axis=1),
            np.concatenate([first.s, second.s], axis=1),
            np.concatenate([first.scc, second.scc]),
            np.concatenate([first.waves, second.waves]),
            first.waves_per_workgroup,
            first.pc,
        )
        both.carried = first.carried + second.carried
        for counter in first.queues.keys() | second.queues.keys():
            for entry in _interleave(first, second, counter):
                both.issue(counter, entry)
        both.signalled = np.concatenate([first.signalled, second.signalled])
        return both


def _interleave(first: Group, second: Group, counter: str) -> list[Outstanding]:
    """One queue out of two; an instruction that both issued becomes one entry, and each wave keeps its own order."""
    left, right = list(first.queues.get(counter, [])), list(second.queues.get(counter, []))
    merged: list[Outstanding] = []
    while left or right:
        same = crossed = False
        if left and right:
            same = left[0].address == right[0].address
            # Each has the other's first further back: the right one goes first.
            crossed = not same and _has(left, right[0]) and _has(right, left[0])
        takes_left = bool(left) and not crossed
        takes_right = same or not takes_left
        pair = left.pop(0) if takes_left else None, right.pop(0) if takes_right else None
        merged.append(_joined(*pair, first.width, second.width))
    return merged


def _has(queue: list[Outstanding], entry: Outstanding) -> bool:
    return any(each.address == entry.address for each in queue)


def _joined(left: Outstanding | None, right: Outstanding | None, first: int, second: int) -> Outstanding:
    def waves(entry: Outstanding | None, width: int) -> NDArray[np.bool_]:
        if entry is None:
            return np.zeros(width, np.bool_)
        return np.ones(width, np.bool_) if entry.waves is None else entry.waves

    kept = left or right
    assert kept is not None
    together = np.concatenate([waves(left, first), waves(right, second)])
    lds = [entry.lds_bytes for entry in (left, right) if entry is not None and entry.lds_bytes is not None]
    together_lds = [part for parts in lds for part in parts] if lds else None
    return replace(kept, waves=None if together.all() else together, lds_bytes=together_lds)


def _register(bits: int) -> str:
    low = (bits & -bits).bit_length() - 1
    if low >= SGPR_BIT:
        return f"s{low - SGPR_BIT}"
    number = low // 2
    return f"v{number}" if number < ACC_BASE else f"a{number - ACC_BASE}"
