"""Races in global memory: two waves touch a byte, one of them writing, and nothing orders them.

Nothing orders workgroups of one launch. A barrier orders the waves of one workgroup, whether or not they waited for
their stores before it: on one compute unit a first-level cache serves them in order (LLVM's memory model, CU mode), and
the mode that splits a workgroup over two is not told apart. Atomics do not race with one another; that they can hand
over other bytes, as a lock does, is not modelled, and such a kernel is reported. Writing the value that is there
already counts as a write: no kernel of this project does that from two waves.

Accesses are only noted down while the kernel runs, as the arrays that were made for them anyway. They are compared when
it has ended, and only those of buffers that were written: most loads are of inputs and cost nothing more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rocm_sd.verify.emulator.errors import GlobalRace

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from rocm_sd.verify.emulator.wave import Group

    Array = NDArray[Any]

__all__ = ["ATOMIC", "READ", "WRITE", "Lanes", "Races", "lanes_of"]

READ, WRITE, ATOMIC = 1, 2, 4
_VERBS = {READ: "reads", WRITE: "writes", ATOMIC: "changes atomically"}
# A wave and a stretch of its workgroup between two barriers, in one number: 32 waves are the most a workgroup has.
_WAVE_BITS = 6
# Lanes of accesses kept in memory, 8 bytes each, before they are reduced to what other workgroups can still race with.
_KEPT_LANES = 1 << 23


@dataclass(slots=True)
class Lanes:
    """Which waves the lanes of an access belong to; worked out only where they are compared.

    chosen: one of [waves, lanes] for each lane that takes part, or None for all. inside: of those, [elements, lanes]
    that were let through. late: waves that had signalled a barrier which they had not passed, or None for none.
    """

    waves: Array
    width: int
    chosen: Array | None = None
    inside: Array | None = None
    late: Array | None = None

    def numbers(self) -> Array:
        return self._spread(self.waves)

    def are_late(self) -> Array:
        assert self.late is not None
        return self._spread(self.late)

    def only(self, keep: Array) -> Lanes:
        late = None if self.late is None else self.are_late()[keep]
        return Lanes(self.numbers()[keep], 1, late=late)

    def _spread(self, values: Array) -> Array:
        if self.chosen is None:
            spread = np.repeat(values, self.width)
        else:
            spread = np.broadcast_to(values[:, None], self.chosen.shape)[self.chosen]
        return spread if self.inside is None else np.broadcast_to(spread, self.inside.shape)[self.inside]


def lanes_of(g: Group, inside: Array | None = None, *, scalar: bool = False) -> Lanes:
    """Those under EXEC, or one for each wave."""
    late = g.signalled.copy() if g.signalled.any() else None
    if scalar:
        return Lanes(g.waves, 1, late=late)
    return Lanes(g.waves, g.lanes, None if g.full else g.exec, inside, late)


@dataclass(slots=True)
class _Access:
    """One instruction's: bytes from `offsets` on in the backing array, `count` elements for each lane."""

    offsets: Array
    element: int
    count: int
    kind: int
    where: int
    # Wave and stretch of each lane, or what they follow from.
    codes: Array | tuple[Lanes, Array]


class Races:
    """The accesses of one launch, by the chunk of memory that they go to."""

    def __init__(self, describe: Callable[[int], str]) -> None:
        """`describe` names a byte of the backing array."""
        self._describe = describe
        self._waves_per_workgroup = 1
        self._log: dict[int, list[_Access]] = {}
        self._written: set[int] = set()
        self._late: list[tuple[int, _Access]] = []
        self._kept = 0
        # By stretch: the workgroup it belongs to. By workgroup at hand: the stretch it is in.
        self._owners: list[int] = []
        self._stretches = np.zeros(0, np.int64)

    def begin(self, workgroups: Array, waves_per_workgroup: int) -> None:
        """These, by their numbers in the grid, start; those before have ended."""
        self._waves_per_workgroup = waves_per_workgroup
        if self._kept > _KEPT_LANES:
            self.check()
            self._reduce()
        self._late.clear()
        self._stretches = len(self._owners) + np.arange(len(workgroups))
        self._owners += workgroups.tolist()

    def barrier(self, workgroups: Array) -> None:
        """Workgroups at hand pass a barrier. What a wave did after it signalled belongs to both sides."""
        chosen = np.unique(workgroups)
        before, self._stretches = self._stretches, self._stretches.copy()
        self._stretches[chosen] = len(self._owners) + np.arange(len(chosen))
        self._owners += [self._owners[stretch] for stretch in before[chosen].tolist()]
        late, self._late = self._late, []
        for chunk, access in late:
            assert isinstance(access.codes, tuple)
            lanes, keep = access.codes[0], access.codes[0].are_late()
            codes = self._codes((lanes, self._stretches))[keep]
            self._log[chunk].append(replace(access, offsets=access.offsets[keep], codes=codes))

    def note(self, chunk: int, offsets: Array, element: int, count: int, kind: int, lanes: Lanes, where: int) -> None:
        """All lanes' bytes are of the chunk that begins at that place of the backing array."""
        access = _Access(offsets, element, count, kind, where, (lanes, self._stretches))
        self._log.setdefault(chunk, []).append(access)
        self._kept += offsets.size
        if kind != READ:
            self._written.add(chunk)
        if lanes.late is not None:
            self._late.append((chunk, access))

    def check(self) -> None:
        """Raise for the first byte that two waves race for."""
        for chunk in sorted(self._written):
            self._check(chunk, self._log[chunk])

    def finish(self) -> None:
        """The launch has ended: check, and let the arrays go."""
        self.check()
        self._log.clear()
        self._late.clear()

    def _codes(self, codes: Array | tuple[Lanes, Array]) -> Array:
        if not isinstance(codes, tuple):
            return codes
        lanes, stretches = codes
        waves, size = lanes.numbers(), self._waves_per_workgroup
        found: Array = stretches[waves // size] << _WAVE_BITS | waves % size
        return found

    def _check(self, chunk: int, accesses: list[_Access]) -> None:
        # Bytes are looked at in the smallest elements that any access has: all are aligned to those.
        unit = min(access.element for access in accesses)
        places = [_units(access, chunk, unit) for access in accesses]
        times = np.bincount(np.concatenate([each.reshape(-1) for each in places]))
        written = np.zeros(len(times), np.bool_)
        for access, each in zip(accesses, places, strict=True):
            if access.kind != READ:
                written[each] = True
        shared = (times > 1) & written
        if not shared.any():
            return
        rows = []
        for number, (access, each) in enumerate(zip(accesses, places, strict=True)):
            chosen = shared[each]
            if chosen.any():
                codes = np.broadcast_to(self._codes(access.codes), each.shape)[chosen]
                rows.append((each[chosen], codes, np.full(len(codes), number)))
        place, code, source = (np.concatenate(column) for column in zip(*rows, strict=True))
        kind = np.array([access.kind for access in accesses])[source]
        workgroup = np.array(self._owners)[code >> _WAVE_BITS]
        # Between workgroups all over the launch; between waves of one, where they are in the same stretch.
        for within, who in ((place, workgroup), (place * len(self._owners) + (code >> _WAVE_BITS), code)):
            first = _first_race(within, who, kind)
            if first is not None:
                pair = [(accesses[source[row]], int(code[row])) for row in first]
                raise self._race(chunk + int(place[first[0]]) * unit, *pair)

    def _race(self, offset: int, here: tuple[_Access, int], there: tuple[_Access, int]) -> GlobalRace:
        (access, code), (other, other_code) = here, there
        mine, its = (self._owners[each >> _WAVE_BITS] for each in (code, other_code))
        wave, its_wave = (each & (1 << _WAVE_BITS) - 1 for each in (code, other_code))
        same = mine == its
        return GlobalRace(
            f"Wave {wave} of workgroup {mine} {_VERBS[access.kind]} {self._describe(offset)}, which wave {its_wave} of "
            f"{'the same workgroup' if same else f'workgroup {its}'} {_VERBS[other.kind]} at {other.where:#x} "
            f"{'with no barrier between' if same else 'in the same launch'}.",
            address=access.where,
            hint=None if same else "Workgroups run in any order: use a second launch, an atomic, or memory of its own.",
        )

    def _reduce(self) -> None:
        """Of each place keep the first and the last workgroup: one that comes later races with either or none."""
        self._kept = 0
        for chunk, accesses in self._log.items():
            alike: dict[tuple[int, int, int], list[_Access]] = {}
            for access in accesses:
                alike.setdefault((access.element, access.count, access.kind), []).append(access)
            self._log[chunk] = [self._extremes(each) for each in alike.values()]
            self._kept += sum(access.offsets.size for access in self._log[chunk])

    def _extremes(self, accesses: list[_Access]) -> _Access:
        offsets = np.concatenate([access.offsets for access in accesses])
        codes = np.concatenate([self._codes(access.codes) for access in accesses])
        order = np.lexsort((np.array(self._owners)[codes >> _WAVE_BITS], offsets))
        offsets, codes = offsets[order], codes[order]
        edge = np.flatnonzero(np.diff(offsets)) + 1
        keep = np.union1d(np.append(0, edge), np.append(edge, len(offsets)) - 1)
        first = accesses[0]
        return _Access(offsets[keep], first.element, first.count, first.kind, first.where, codes[keep])


def _units(access: _Access, chunk: int, unit: int) -> Array:
    """The places of an access in the chunk: [units of a lane, lanes]."""
    steps = np.arange(access.element * access.count // unit)
    return (access.offsets - chunk) // unit + steps[:, None]


def _first_race(within: Array, who: Array, kind: Array) -> tuple[int, int] | None:
    """Two rows that have the same `within`, another `who`, and a kind that may not meet; the first changes the byte."""
    order = np.lexsort((who, within))
    within, who, kind = within[order], who[order], kind[order]
    edges = np.append(0, np.flatnonzero(np.diff(within)) + 1)
    kinds = np.bitwise_or.reduceat(kind, edges)
    lasts = np.append(edges[1:], len(within)) - 1
    may_not = ((kinds & WRITE) != 0) | (kinds == READ | ATOMIC)
    found = np.flatnonzero((who[edges] != who[lasts]) & may_not)
    if not len(found):
        return None
    rows = np.arange(edges[found[0]], lasts[found[0]] + 1)
    changes = rows[kind[rows] == (WRITE if (kind[rows] == WRITE).any() else ATOMIC)]
    for row in changes.tolist():
        others = rows[(who[rows] != who[row]) & ((kind[rows] != ATOMIC) | (kind[row] != ATOMIC))]
        if len(others):
            return int(order[row]), int(order[others[0]])
    raise AssertionError("a place with a race has a pair that races")
