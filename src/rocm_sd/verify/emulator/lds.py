"""Local memory of workgroups, with a shadow that finds races between waves.

Each byte has shadow bytes: whether a byte was ever written, which wave wrote it and which read it since the last
barrier (0: none, n + 1: wave n, 255: several). They are looked up in units as wide as the access allows, so a check
costs one gather; what looks suspicious there is looked at byte by byte. Reads are only noted down; they are entered
into the shadow when a store of the same epoch needs them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from rocm_sd.verify.emulator.errors import LdsRace, MisalignedAccess, OutOfBounds, UninitialisedRead
from rocm_sd.verify.emulator.memory import REPEAT
from rocm_sd.verify.emulator.units import UNITS, numbers, packed, unit_of, unit_views, unpacked

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Lds", "LdsAccess"]

_SEVERAL = 255


@dataclass(eq=False)
class LdsAccess:
    """One instruction's reads or writes: for each lane its workgroup, its wave number within it, and byte addresses.

    What follows from the addresses alone is worked out once: kernels meet the same ones in every turn of a loop.
    """

    workgroups: NDArray[np.int64]
    waves: NDArray[np.int64]
    addresses: NDArray[np.int64]
    element: int
    count: int
    stores: bool
    distinct: NDArray[np.int64] | None = None
    # Of the LDS that it belongs to: places in units, and the last life of it in which every byte was seen written.
    places: NDArray[np.int64] | None = field(default=None, repr=False)
    known: int = -1
    exclusive: bool | None = None

    @cached_property
    def unit(self) -> int:
        """Bytes that are moved at once."""
        return unit_of(self.addresses, self.element, self.count)

    @cached_property
    def owner(self) -> NDArray[Any]:
        """The shadow of each lane's element: its wave in every byte."""
        return ((self.waves + 1) * REPEAT[self.element]).astype(f"u{self.element}")

    @cached_property
    def unit_owner(self) -> NDArray[Any]:
        return np.repeat((self.waves + 1).astype(np.uint8), self.unit).view(UNITS[self.unit])

    @cached_property
    def distinct_workgroups(self) -> NDArray[np.int64]:
        return np.unique(self.workgroups) if self.distinct is None else self.distinct

    def only(self, keep: NDArray[np.bool_]) -> LdsAccess:
        kept = self.workgroups[keep], self.waves[keep], self.addresses[keep]
        return LdsAccess(*kept, self.element, self.count, self.stores)


class Lds:
    """The LDS of every workgroup at hand."""

    def __init__(self, workgroups: int, size: int) -> None:
        self.size = size
        self.stride = max((size + 15) // 16 * 16, 16)
        self._bytes = np.zeros((4, 0), np.uint8)
        self._life = 0
        self.reset(workgroups)

    def reset(self, workgroups: int) -> None:
        """Forget everything: a new workgroup finds no value that it may rely on."""
        total = workgroups * self.stride
        if self._bytes.shape[1] == total:
            self._bytes[:] = 0
        else:
            self._bytes = np.zeros((4, total), np.uint8)
            self._data, self._written, self._writer, self._reader = (unit_views(row) for row in self._bytes)
        self._life += 1
        self.epochs = np.zeros(workgroups, np.int64)
        self._dirty = np.zeros(workgroups, np.bool_)
        self._any_dirty = False
        self._log: list[tuple[LdsAccess, NDArray[np.int64]]] = []

    def load(self, access: LdsAccess, where: int) -> NDArray[Any]:
        """Elements of shape [count, lanes]."""
        places, unit = self._places(access, where), access.unit
        if access.known != self._life:
            self._require_written(access, places, where)
        if self._any_dirty and self._foreign(self._writer, access, places):
            index, owner = self._index(access, where), access.owner
            writer = self._writer[access.element][index]
            self._compare(access, writer, (writer != 0) & (writer != owner), where, "reads", "wrote")
        self._log.append((access, self.epochs))
        return unpacked(self._data[unit].take(places), unit, access.element)

    def _require_written(self, access: LdsAccess, places: NDArray[np.int64], where: int) -> None:
        """What was written stays so: an access that was found so once needs no second look."""
        every_byte = np.ones(access.unit, np.uint8).view(UNITS[access.unit])
        if np.count_nonzero(numbers(self._written[access.unit].take(places)) != numbers(every_byte)[0]):
            element = access.element
            written = self._written[element][self._index(access, where)]
            missing = access.addresses[(written != REPEAT[element]).any(axis=0)]
            raise UninitialisedRead(
                f"The kernel reads LDS byte {int(missing[0])}, which nothing has written.", address=where
            )
        access.known = self._life

    def _foreign(self, shadow: dict[int, NDArray[Any]], access: LdsAccess, places: NDArray[np.int64]) -> bool:
        """Whether the shadow of these units is neither empty nor the wave's own throughout."""
        found = numbers(shadow[access.unit].take(places))
        touched = found != 0
        if not np.count_nonzero(touched):
            return False
        return bool(np.count_nonzero(touched & (found != numbers(access.unit_owner))))

    def store(self, access: LdsAccess, values: NDArray[Any], where: int) -> None:
        """`values` has the shape [count, lanes]."""
        places, unit = self._places(access, where), access.unit
        self._enter_reads()
        if access.exclusive is None:
            access.exclusive = self._is_exclusive(access, places)
        suspicious = self._any_dirty and (
            self._foreign(self._reader, access, places) or self._foreign(self._writer, access, places)
        )
        if suspicious or not access.exclusive:
            self._store_with_care(access, values, where)
        else:
            self._data[unit][places] = packed(values, unit, access.element)
            if access.known != self._life:
                self._written[unit][places] = np.ones(unit, np.uint8).view(UNITS[unit])
            self._writer[unit][places] = access.unit_owner
        access.known = self._life
        self._dirty[access.distinct_workgroups] = True
        self._any_dirty = True

    def _is_exclusive(self, access: LdsAccess, places: NDArray[np.int64]) -> bool:
        """Whether no two waves write the same unit at once."""
        writer = self._writer[access.unit]
        before = writer.take(places)
        writer[places] = access.unit_owner
        alone = not np.count_nonzero(numbers(writer.take(places)) != numbers(access.unit_owner))
        writer[places] = before
        return alone

    def _store_with_care(self, access: LdsAccess, values: NDArray[Any], where: int) -> None:
        """A store that meets another wave's bytes, which is a race unless nothing changes by it."""
        index, element, owner = self._index(access, where), access.element, access.owner
        # Writing the value that is there already disturbs nobody; layouts that hold copies of a value do it.
        changes = self._data[element][index] != values
        reader, writer = self._reader[element][index], self._writer[element][index]
        self._compare(access, reader, (reader != 0) & (reader != owner) & changes, where, "writes", "read")
        self._compare(access, writer, (writer != 0) & (writer != owner) & changes, where, "writes", "wrote")
        self._data[element][index] = values
        self._written[element][index] = REPEAT[element]
        self._writer[element][index] = np.broadcast_to(owner, index.shape)
        final = self._writer[element][index]
        if (final != owner).any():
            lost = (final != owner) & (self._data[element][index] != values)
            self._compare(access, final, lost, where, "writes", "wrote")

    def barrier(self, workgroups: NDArray[np.int64], unfinished: list[LdsAccess]) -> None:
        """A new epoch. What was not waited for before the barrier may still happen after it, and is carried over."""
        chosen = np.unique(workgroups)
        # Never in place: the log holds on to the epochs of its time.
        self.epochs = self.epochs.copy()
        self.epochs[chosen] += 1
        if len(chosen) == len(self.epochs):
            self._log.clear()
        stale = chosen[self._dirty[chosen]]
        for shadow in (self._writer[1], self._reader[1]):
            rows = shadow.reshape(-1, self.stride)
            rows[slice(None) if len(stale) == len(rows) else stale] = 0
        self._dirty[chosen] = False
        for access in unfinished:
            if access.stores:
                index = self._index(access, 0)
                self._writer[access.element][index] = np.broadcast_to(access.owner, index.shape)
                self._dirty[access.distinct_workgroups] = True
            else:
                self._log.append((access, self.epochs))
        self._any_dirty = bool(self._dirty.any())

    def _enter_reads(self) -> None:
        log, self._log = self._log, []
        for access, epochs in log:
            stale = epochs != self.epochs
            live = access.only(~stale[access.workgroups]) if stale.any() else access
            if not len(live.addresses):
                continue
            self._enter(live)
            self._dirty[live.distinct_workgroups] = True
            self._any_dirty = True

    def _enter(self, access: LdsAccess) -> None:
        base = access.workgroups * self.stride + access.addresses
        index = base + np.arange(access.element * access.count)[:, None]
        owner = np.broadcast_to((access.waves + 1).astype(np.uint8), index.shape)
        before = self._reader[1][index]
        self._reader[1][index] = np.where((before == 0) | (before == owner), owner, _SEVERAL)
        after = self._reader[1][index]
        self._reader[1][index[after != owner]] = _SEVERAL

    def _places(self, access: LdsAccess, where: int) -> NDArray[np.int64]:
        if access.places is None:
            self._require_inside(access, where)
            access.places = self._spread(access, access.unit)
        return access.places

    def _index(self, access: LdsAccess, where: int) -> NDArray[np.int64]:
        self._require_inside(access, where)
        return self._spread(access, access.element)

    def _spread(self, access: LdsAccess, width: int) -> NDArray[np.int64]:
        """Places in words of `width` bytes, [words, lanes]."""
        base = access.workgroups * self.stride + access.addresses >> (width.bit_length() - 1)
        return base + np.arange(access.element * access.count // width)[:, None]

    def _require_inside(self, access: LdsAccess, where: int) -> None:
        addresses, element = access.addresses, access.element
        if addresses.size and (addresses.min() < 0 or addresses.max() + element * access.count > self.size):
            bad = addresses[(addresses < 0) | (addresses + element * access.count > self.size)]
            raise OutOfBounds(
                f"An access of {element * access.count} bytes at LDS byte {int(bad[0])} is outside of the {self.size} "
                "bytes that the kernel reserves.",
                address=where,
            )
        if element > 1 and (addresses & (element - 1)).any():
            bad = addresses[(addresses & (element - 1)) != 0]
            raise MisalignedAccess(f"The LDS address {int(bad[0])} is not aligned to {element} bytes.", address=where)

    def _compare(
        self, access: LdsAccess, shadow: NDArray[Any], suspects: NDArray[np.bool_], where: int, does: str, did: str
    ) -> None:
        """Raise if, byte by byte, another wave really touched what this one touches."""
        if not suspects.any():
            return
        element = access.element
        owners = np.broadcast_to((access.waves + 1).astype(np.uint8), suspects.shape)[suspects]
        addresses = (access.addresses + element * np.arange(access.count)[:, None])[suspects]
        touched = np.ascontiguousarray(shadow[suspects])[:, None].view(np.uint8)
        foreign = (touched != 0) & (touched != owners[:, None])
        if foreign.any():
            row, byte = np.argwhere(foreign)[0]
            other = int(touched[row, byte])
            who = "several waves" if other == _SEVERAL else f"wave {other - 1}"
            raise LdsRace(
                f"Wave {int(owners[row]) - 1} {does} LDS byte {int(addresses[row]) + int(byte)}, which {who} of the "
                f"same workgroup {did} with no barrier between.",
                address=where,
            )
