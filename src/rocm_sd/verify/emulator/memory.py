"""Global memory: buffers far apart in the address space, their bytes close together in one backing array.

The high bits of an address name the buffer, so that an index which runs out of one never lands in another, however far
it runs. Buffers whose arrays overlap share their bytes, and each keeps its own bounds. Every access is one fancy-index
operation over all lanes of all waves at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from rocm_sd.verify.emulator.errors import (
    EmulationError,
    MisalignedAccess,
    OutOfBounds,
    UninitialisedRead,
    UnwrittenOutput,
)
from rocm_sd.verify.emulator.processes import zeros
from rocm_sd.verify.emulator.races import ATOMIC, READ, WRITE, Lanes, Races
from rocm_sd.verify.emulator.units import UNITS, numbers, packed, unit_of, unit_views, unpacked

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["REPEAT", "Buffer", "Memory", "Region"]

# 2^40 bytes from one buffer to the next: no 32-bit index reaches that far, times any element size. User addresses have
# 47 bits, and slot 0 stays empty, so that a pointer that was never filled in does not land in a buffer.
_SLOT_BITS = 40
_SLOTS = 1 << 47 - _SLOT_BITS
# A buffer begins a little below a multiple of 4 GiB: a sum whose carry into the upper half is lost goes astray.
_BEGINS = (1 << 32) - 4096
_ALIGNMENT = 256
# What an allocation of torch or numpy is a multiple of at least. Views that begin elsewhere are as misaligned here.
_HOST_ALIGNMENT = 16

_INITIALISED, _WRITTEN = 1, 2
REPEAT = {1: 0x01, 2: 0x0101, 4: 0x01010101}
"""A byte in every byte of an element, by the size of the element."""


@cache
def _filled(unit: int, byte: int) -> NDArray[Any]:
    """One unit with the same in every byte."""
    return np.full(unit, byte, np.uint8).view(UNITS[unit])


@dataclass(eq=False)
class Buffer:
    """A kernel argument that points to memory; the array is read at launch and written back at the end.

    `known` says for each byte whether it holds a value, where that is kept over several launches; it is updated.
    """

    array: NDArray[Any]
    name: str = ""
    initialised: bool = True
    must_write: bool = False
    known: NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        if not self.array.flags.c_contiguous:
            raise ValueError(
                f"The array of buffer {self.name!r} is not contiguous. Type: numpy.ascontiguousarray(array)"
            )

    @property
    def whole(self) -> bool:
        """Every byte holds a value."""
        return self.initialised and self.known is None

    @property
    def span(self) -> tuple[int, int]:
        """First and last byte, the latter excluded, in the memory of this process."""
        first: int = self.array.__array_interface__["data"][0]
        return first, first + self.array.nbytes


@dataclass(eq=False)
class Chunk:
    """Bytes that lie together in the backing array: those of one buffer, or of several that overlap."""

    start: int
    size: int
    # Whether every byte held a value from the start: then no load of it need be looked at.
    complete: bool = True


@dataclass(eq=False)
class Region:
    """A buffer: its addresses, and where its bytes lie in the backing array."""

    name: str
    address: int
    start: int
    size: int
    chunk: Chunk
    buffer: Buffer | None = field(default=None, repr=False)

    @property
    def place(self) -> slice:
        return slice(self.start, self.start + self.size)


class Memory:
    """The address space of one launch."""

    def __init__(self, buffers: list[Buffer], kernarg_size: int, *, shared: bool = False) -> None:
        if len(buffers) > _SLOTS - 2:
            raise EmulationError(f"A launch with {len(buffers)} buffers: the emulator has room for {_SLOTS - 2}.")
        self.races = Races(self._byte)
        self.regions: list[Region] = []
        self._slots: dict[int, Region] = {}
        self.size = 0
        for chunk, members in self._chunks(buffers):
            begins = min((buffer.span[0] for _, buffer in members), default=0)
            for number, buffer in members:
                self._map(buffer.name or f"argument {number}", chunk, buffer.span[0] - begins, buffer)
        kernarg = Chunk(self._room(kernarg_size), kernarg_size)
        self.kernarg = self._map("kernel arguments", kernarg, 0, None)
        size = _up(self.size, _ALIGNMENT)
        self.data, self.shadow = zeros(size, shared=shared), zeros(size, shared=shared)
        self._data, self._shadow = unit_views(self.data), unit_views(self.shadow)
        for region in self.regions:
            self._fill(region)
        for chunk in {region.chunk for region in self.regions if not (region.buffer is None or region.buffer.whole)}:
            chunk.complete = bool((self.shadow[chunk.start : chunk.start + chunk.size] & _INITIALISED).all())
        # By slot, for lanes that go to several buffers at once: first and last address, and the way to the bytes.
        self._bounds = np.zeros((3, _SLOTS), np.int64)
        for slot, region in self._slots.items():
            self._bounds[:, slot] = region.address, region.address + region.size, region.start - region.address

    def _chunks(self, buffers: list[Buffer]) -> list[tuple[Chunk, list[tuple[int, Buffer]]]]:
        """Buffers with their numbers, those together whose arrays share bytes."""
        together: list[tuple[int, int, list[tuple[int, Buffer]]]] = []
        for number, buffer in sorted(enumerate(buffers), key=lambda each: each[1].span):
            first, last = buffer.span
            if together and first < together[-1][1]:
                before, end, members = together[-1]
                together[-1] = before, max(end, last), [*members, (number, buffer)]
            else:
                together.append((first, last, [(number, buffer)]))
        together.sort(key=lambda each: min(each[2])[0])
        return [
            (Chunk(self._room(last - first) + first % _HOST_ALIGNMENT, last - first), members)
            for first, last, members in together
        ]

    def _room(self, size: int) -> int:
        place = self.size
        self.size += _up(size + _HOST_ALIGNMENT, _ALIGNMENT)
        return place

    def _map(self, name: str, chunk: Chunk, offset: int, buffer: Buffer | None) -> Region:
        slot, start = len(self.regions) + 1, chunk.start + offset
        size = chunk.size if buffer is None else buffer.array.nbytes
        address = (slot << _SLOT_BITS) + _BEGINS + start % _ALIGNMENT
        region = Region(name, address, start, size, chunk, buffer)
        self.regions.append(region)
        self._slots[slot] = region
        return region

    def _fill(self, region: Region) -> None:
        buffer = region.buffer
        if buffer is not None and buffer.known is not None:
            self.shadow[region.place] |= _INITIALISED * buffer.known.astype(np.uint8)
        elif buffer is None or buffer.whole:
            self.shadow[region.place] |= _INITIALISED
        if buffer is not None:
            self.data[region.place] = buffer.array.reshape(-1).view(np.uint8)

    def address_of(self, buffer: Buffer) -> int:
        return next(region.address for region in self.regions if region.buffer is buffer)

    def write_arguments(self, raw: bytes) -> None:
        start = self.kernarg.start
        self.data[start : start + len(raw)] = np.frombuffer(raw, np.uint8)

    def finish(self) -> None:
        """Hand the results back and complain of outputs that were not written whole."""
        for region in self.regions:
            if region.buffer is None:
                continue
            written = self.shadow[region.place] & _WRITTEN
            if region.buffer.known is not None:
                region.buffer.known |= written != 0
            if written.any():
                region.buffer.array.reshape(-1).view(np.uint8)[:] = self.data[region.place]
            if region.buffer.must_write and not written.all():
                missing = np.flatnonzero(written == 0)
                raise UnwrittenOutput(
                    f"{len(missing)} of {region.size} bytes of {region.name} were never written, the first at offset "
                    f"{int(missing[0])}.",
                    hint="Look for a mask or a grid that misses the tail.",
                )

    def load(
        self, addresses: NDArray[np.uint64], element: int, count: int, where: int, lanes: Lanes | None = None
    ) -> NDArray[np.unsignedinteger]:
        """`count` elements of 1, 2 or 4 bytes from each address on: [count, lanes]. `lanes`: whose, to find races."""
        offsets, chunk, unit = self._locate(addresses, element, count, where)
        self._note(chunk, offsets, element, count, READ, lanes, where)
        index = _places(offsets, unit, element * count)
        if chunk is None or not chunk.complete:
            wanted = numbers(_filled(unit, _INITIALISED))[0]
            if np.count_nonzero((numbers(self._shadow[unit].take(index)) & wanted) != wanted):
                raise self._uninitialised(addresses, offsets, element * count, where)
        found: NDArray[Any] = unpacked(self._data[unit].take(index), unit, element)
        if lanes is not None and chunk is not None:
            found = self.races.seen(found, chunk.start, offsets, lanes, where)
        return found

    def store(
        self,
        addresses: NDArray[np.uint64],
        values: NDArray[Any],
        element: int,
        where: int,
        lanes: Lanes | None = None,
    ) -> None:
        """`values` is [count, lanes]: consecutive elements from each address on."""
        offsets, chunk, unit = self._locate(addresses, element, len(values), where)
        self._note(chunk, offsets, element, len(values), WRITE, lanes, where)
        index = _places(offsets, unit, element * len(values))
        self._data[unit][index] = packed(values, unit, element)
        self._shadow[unit][index] = _filled(unit, _INITIALISED | _WRITTEN)

    def note_atomic(self, addresses: NDArray[np.uint64], dwords: int, where: int, lanes: Lanes) -> None:
        """An atomic operation is a load and a store that no other comes between."""
        offsets, chunk, _ = self._locate(addresses, 4, dwords, where)
        self._note(chunk, offsets, 4, dwords, ATOMIC, lanes, where)

    def _note(
        self,
        chunk: Chunk | None,
        offsets: NDArray[np.int64],
        element: int,
        count: int,
        kind: int,
        lanes: Lanes | None,
        where: int,
    ) -> None:
        if lanes is None or chunk is self.kernarg.chunk or not offsets.size:
            return
        if chunk is not None:
            self.races.note(chunk.start, offsets, element, count, kind, lanes, where)
            return
        starts = np.array(sorted({region.chunk.start for region in self.regions}))
        of = starts[np.searchsorted(starts, offsets, "right") - 1]
        for start in np.unique(of).tolist():
            keep = of == start
            self.races.note(start, offsets[keep], element, count, kind, lanes.only(keep), where, fixed=True)

    def _byte(self, offset: int) -> str:
        region = next(r for r in self.regions if r.start <= offset < r.start + r.size)
        return f"byte {offset - region.start} of {region.name}"

    def _locate(
        self, addresses: NDArray[np.uint64], element: int, count: int, where: int
    ) -> tuple[NDArray[np.int64], Chunk | None, int]:
        """Where the bytes are in the backing array, the chunk where all are of one, and the widest unit of all."""
        places, size = addresses.view(np.int64), element * count
        if not places.size:
            return places, None, element
        low, high = int(places.min()), int(places.max())
        region = self._slots.get(low >> _SLOT_BITS)
        chunk: Chunk | None
        if region is not None and region.address <= low and high + size <= region.address + region.size:
            offsets, chunk = places - (region.address - region.start), region.chunk
        else:
            offsets, chunk = self._locate_in_several(places, size, where), None
        unit = unit_of(offsets, element, count)
        if unit == element and np.count_nonzero(offsets & (element - 1)):
            bad = addresses[(offsets & (element - 1)) != 0]
            raise MisalignedAccess(
                f"An access of {size} bytes at {int(bad[0]):#x} is not aligned to {element} bytes.", address=where
            )
        return offsets, chunk, unit

    def _locate_in_several(self, places: NDArray[np.int64], size: int, where: int) -> NDArray[np.int64]:
        slots = places >> _SLOT_BITS
        first, last, way = self._bounds[:, np.where((slots > 0) & (slots < _SLOTS), slots, 0)]
        outside = (places < first) | (places + size > last)
        if outside.any():
            raise self._outside(int(places[outside][0]), size, where)
        offsets: NDArray[np.int64] = places + way
        return offsets

    def _outside(self, address: int, size: int, where: int) -> OutOfBounds:
        nearest = min(
            self.regions, key=lambda r: max(r.address - address, address - (r.address + max(r.size, 1) - 1), 0)
        )
        return OutOfBounds(
            f"An access of {size} bytes at {address:#x} lies in no buffer: the nearest is {nearest.name} "
            f"({nearest.size} bytes), and the access is at offset {address - nearest.address} of it.",
            address=where,
            hint="Look for an index that runs past the end, or a mask that is missing.",
        )

    def _uninitialised(
        self, addresses: NDArray[np.uint64], offsets: NDArray[np.int64], size: int, where: int
    ) -> UninitialisedRead:
        missing = self.shadow[_places(offsets, 1, size)] & _INITIALISED == 0
        address = int(addresses[missing.any(axis=0)][0])
        region = self._slots[address >> _SLOT_BITS]
        start = address - region.address
        known = self.shadow[region.place][start : start + size] & _INITIALISED
        return UninitialisedRead(
            f"The kernel reads byte {start + int(np.argmin(known))} of {region.name}, which nothing has written.",
            address=where,
        )


def _places(offsets: NDArray[np.int64], unit: int, size: int) -> NDArray[np.int64]:
    """Of `size` bytes from each offset on, indices into a view of the backing array as units: [units, lanes]."""
    index: NDArray[np.int64] = offsets >> (unit.bit_length() - 1) if unit > 1 else offsets
    if unit == size:
        return index[None]
    return index + np.arange(size // unit, dtype=np.int64)[:, None]


def _up(value: int, step: int) -> int:
    return (value + step - 1) // step * step
