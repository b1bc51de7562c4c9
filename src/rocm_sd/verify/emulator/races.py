"""Races in global memory: two waves touch a byte, one of them writing, and nothing orders them.

Nothing orders workgroups of one launch. A barrier orders the waves of one workgroup, whether or not they waited for
their stores before it: on one compute unit a first-level cache serves them in order (LLVM's memory model, CU mode), and
the mode that splits a workgroup over two is not told apart. Atomics do not race with one another; that they can hand
over other bytes, as a lock does, is not modelled, and such a kernel is reported. Writing the value that is there
already counts as a write: no kernel of this project does that from two waves.

Of a read that races with a write it is asked whether it matters: kernels that work in place let lanes beyond the end
read what is another's, so that no wave parts, and forget it. The launch is executed again with other values for such
reads; where its results stay as they are, down to the bit, there is no race.

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

__all__ = ["ATOMIC", "READ", "WRITE", "Doubt", "Lanes", "Races", "Share", "lanes_of", "may_race"]

READ, WRITE, ATOMIC = 1, 2, 4
_VERBS = {READ: "reads", WRITE: "writes", ATOMIC: "changes atomically"}
# A wave and a stretch of its workgroup between two barriers, in one number: 32 waves are the most a workgroup has.
_WAVE_BITS = 6
# Lanes of accesses kept in memory, 8 bytes each, before they are reduced to what other workgroups can still race with.
_KEPT_LANES = 1 << 23


@dataclass(slots=True)
class Lanes:
    """Which waves the lanes of an access belong to; worked out only where they are compared.

    chosen: one of [waves, lanes] for each lane that takes part, or None for all. inside: of those, [lanes] or
    [elements, lanes] that were let through. late: waves that had signalled a barrier which they had not passed, or None
    for none.
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
    # A repeated launch cannot give it other values: it stands for several instructions, or was to several chunks.
    fixed: bool = False


@dataclass(slots=True)
class Doubt:
    """Reads that race with a write, and what to report where one of them matters."""

    race: GlobalRace
    # By chunk: the unit of its places, and numbers made of a place and a wave.
    reads: dict[int, tuple[int, Array]]
    instructions: set[int]


@dataclass(slots=True)
class Share:
    """What one process touched of a launch that several execute."""

    # By chunk that it wrote to: the unit of places, and the kinds of access to each place.
    written: dict[int, tuple[int, Array]]
    # Chunks that it only read, and whether a read of its own is in doubt.
    read: set[int]
    doubtful: bool


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
        self._doubt: Doubt | None = None
        # What doubtful reads give in place of what is there, and which those are, where a launch is repeated.
        self._other_values: tuple[int, Doubt] | None = None
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

    def note(
        self,
        chunk: int,
        offsets: Array,
        element: int,
        count: int,
        kind: int,
        lanes: Lanes,
        where: int,
        *,
        fixed: bool = False,
    ) -> None:
        """All lanes' bytes are of the chunk that begins at that place of the backing array."""
        if self._other_values is not None:
            return
        access = _Access(offsets, element, count, kind, where, (lanes, self._stretches), fixed)
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

    def finish(self) -> Doubt | None:
        """The launch has ended: check, let the arrays go, and say which reads race if they matter."""
        self.check()
        self._log.clear()
        self._late.clear()
        return self._doubt

    def forget(self) -> None:
        """Another process has what was noted so far."""
        self._log.clear()
        self._written.clear()
        self._late.clear()
        self._kept, self._doubt = 0, None

    def share(self) -> Share:
        """The process has done its share of the launch: check that, let the arrays go, and say what it touched."""
        self.check()
        written = {}
        for chunk in self._written:
            accesses = self._log[chunk]
            unit = min(access.element for access in accesses)
            places = [_units(access, chunk, unit) for access in accesses]
            kinds = np.zeros(1 + max(int(each.max()) for each in places), np.uint8)
            for access, each in zip(accesses, places, strict=True):
                kinds[each] |= np.uint8(access.kind)
            written[chunk] = unit, kinds
        share = Share(written, self._log.keys() - self._written, self._doubt is not None)
        self.forget()
        return share

    def repeat_with(self, pattern: int, doubt: Doubt) -> None:
        """Repeat another launch: bytes that doubtful reads find are turned by `pattern`."""
        self._other_values = pattern, doubt

    def seen(self, found: Array, chunk: int, offsets: Array, lanes: Lanes, where: int) -> Array:
        """What a load of [count, lanes] elements gets to see: what it found, but where a launch is repeated."""
        if self._other_values is None or where not in self._other_values[1].instructions:
            return found
        pattern, doubt = self._other_values
        unit, keys = doubt.reads.get(chunk, (1, np.zeros(0, np.int64)))
        size = found.itemsize
        place = offsets - chunk + size * np.arange(len(found))[:, None]
        units = (place[:, :, None] + np.arange(size)) // unit
        chosen = np.isin(_keys(units, self._wave_numbers(self._codes((lanes, self._stretches)))[:, None]), keys)
        changed = np.ascontiguousarray(found)
        changed.view(np.uint8).reshape(chosen.shape)[chosen] ^= np.uint8(pattern)
        return changed

    def _wave_numbers(self, codes: Array) -> Array:
        """In the whole launch, whatever stretch they are in."""
        numbers: Array = np.array(self._owners)[codes >> _WAVE_BITS] << _WAVE_BITS | codes & (1 << _WAVE_BITS) - 1
        return numbers

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
        place, code, source = self._shared(accesses, chunk, unit)
        kind = np.array([access.kind for access in accesses])[source]
        stretch = code >> _WAVE_BITS

        def race(first: int, second: int) -> GlobalRace:
            pair = [(accesses[source[row]], int(code[row])) for row in (first, second)]
            return self._race(chunk + int(place[first]) * unit, *pair)

        # Between workgroups all over the launch; between waves of one, where they are in the same stretch.
        workgroup = np.array(self._owners)[stretch]
        for within, who in ((place, workgroup), (place * len(self._owners) + stretch, code)) if len(place) else ():
            certain, reads = _conflicts(within, who, kind)
            if certain is not None:
                raise race(*certain)
            if not len(reads):
                continue
            writes = np.flatnonzero((within == within[reads[0]]) & (kind == WRITE))
            doubted = [accesses[number] for number in np.unique(source[reads]).tolist()]
            keys = _keys(place[reads], self._wave_numbers(code[reads]))
            doubt = Doubt(race(int(writes[0]), int(reads[0])), {chunk: (unit, keys)}, {each.where for each in doubted})
            if any(access.fixed for access in doubted):
                raise doubt.race
            self._add_doubt(doubt)

    def _shared(self, accesses: list[_Access], chunk: int, unit: int) -> tuple[Array, Array, Array]:
        """Of places that are written and touched more than once: each touch, its wave and stretch, its access."""
        places = [_units(access, chunk, unit) for access in accesses]
        times = np.bincount(np.concatenate([each.reshape(-1) for each in places]))
        written = np.zeros(len(times), np.bool_)
        for access, each in zip(accesses, places, strict=True):
            if access.kind != READ:
                written[each] = True
        shared = (times > 1) & written
        rows = [(np.zeros(0, np.int64),) * 3]
        for number, (access, each) in enumerate(zip(accesses, places, strict=True)):
            chosen = shared[each]
            if chosen.any():
                codes = np.broadcast_to(self._codes(access.codes), each.shape)[chosen]
                rows.append((each[chosen], codes, np.full(len(codes), number)))
        place, code, source = (np.concatenate(column) for column in zip(*rows, strict=True))
        return place, code, source

    def _add_doubt(self, more: Doubt) -> None:
        if self._doubt is None:
            self._doubt = more
            return
        self._doubt.instructions |= more.instructions
        for chunk, (unit, keys) in more.reads.items():
            before = self._doubt.reads.get(chunk)
            if before is not None and before[0] != unit:
                raise more.race
            self._doubt.reads[chunk] = unit, keys if before is None else np.union1d(before[1], keys)

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
        return _Access(offsets[keep], first.element, first.count, first.kind, first.where, codes[keep], fixed=True)


def may_race(shares: list[Share]) -> bool:
    """Whether a workgroup of one process may race with one of another, or a read matters; one process can say."""
    written = set().union(*(share.written for share in shares))
    if any(share.doubtful or share.read & written for share in shares):
        return True
    for chunk in written:
        parts = [share.written[chunk] for share in shares if chunk in share.written]
        smallest = min(unit for unit, _ in parts)
        kinds = [np.repeat(each, unit // smallest) for unit, each in parts]
        before = np.zeros(max(len(each) for each in kinds), np.uint8)
        for each in kinds:
            there = before[: len(each)]
            # Atomic operations are none between processes.
            if np.count_nonzero((there != 0) & (each != 0) & ((there | each) & (WRITE | ATOMIC) != 0)):
                return True
            there |= each
    return False


def _units(access: _Access, chunk: int, unit: int) -> Array:
    """The places of an access in the chunk: [units of a lane, lanes]."""
    steps = np.arange(access.element * access.count // unit)
    return (access.offsets - chunk) // unit + steps[:, None]


def _keys(places: Array, waves: Array) -> Array:
    # Workgroups of a launch and their waves fit 32 bits, places of what can be emulated 31.
    keys: Array = places << 32 | waves
    return keys


def _conflicts(within: Array, who: Array, kind: Array) -> tuple[tuple[int, int] | None, Array]:
    """Of rows that have the same `within` and another `who`: two that may not meet, or reads that meet one writer."""
    order = np.lexsort((who, within))
    within, who, kind = within[order], who[order], kind[order]
    edges = np.append(0, np.flatnonzero(np.diff(within)) + 1)
    lasts = np.append(edges[1:], len(within)) - 1
    kinds = np.bitwise_or.reduceat(kind, edges)
    racing = (who[edges] != who[lasts]) & (((kinds & WRITE) != 0) | (kinds == READ | ATOMIC))
    last_writer = np.maximum.reduceat(np.where(kind == WRITE, who, -1), edges)
    first_writer = np.minimum.reduceat(np.where(kind == WRITE, who, np.iinfo(np.int64).max), edges)
    certain = np.flatnonzero(racing & (((kinds & ATOMIC) != 0) | (first_writer != last_writer)))
    if len(certain):
        rows = np.arange(edges[certain[0]], lasts[certain[0]] + 1)
        return _pair(rows, who, kind, order), order[:0]
    group = np.repeat(np.arange(len(edges)), lasts - edges + 1)
    return None, order[racing[group] & (kind == READ) & (who != last_writer[group])]


def _pair(rows: Array, who: Array, kind: Array, order: Array) -> tuple[int, int]:
    """Two of the rows that may not meet, one that changes the byte first."""
    changes = rows[kind[rows] == (WRITE if (kind[rows] == WRITE).any() else ATOMIC)]
    for row in changes.tolist():
        others = rows[(who[rows] != who[row]) & ((kind[rows] != ATOMIC) | (kind[row] != ATOMIC))]
        if len(others):
            return int(order[row]), int(order[others[0]])
    raise AssertionError("a place with a race has a pair that races")
