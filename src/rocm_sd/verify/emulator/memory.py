"""Global memory: buffers at spaced addresses in one backing array, with a shadow byte for each byte.

The gaps between buffers are mapped nowhere, so that an index one past the end is an error and not a neighbour's value.
Every access is one fancy-index operation over all lanes of all waves at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rocm_sd.verify.emulator.errors import MisalignedAccess, OutOfBounds, UninitialisedRead, UnwrittenOutput

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["BASE_ADDRESS", "REPEAT", "Buffer", "Memory", "Region", "views"]

# Far from zero, so that a pointer that was never filled in does not land in a buffer.
BASE_ADDRESS = 0x7F00_0000_0000
_GAP = 1 << 16
_ALIGNMENT = 256

_MAPPED, _INITIALISED, _WRITTEN = 1, 2, 4
_ALL = _MAPPED | _INITIALISED | _WRITTEN
REPEAT = {1: 0x01, 2: 0x0101, 4: 0x01010101}
"""A byte in every byte of an element, by the size of the element."""


def views(base: NDArray[np.uint8]) -> dict[int, NDArray[Any]]:
    """The same bytes as elements of 1, 2 and 4 bytes."""
    return {width: base.view(f"u{width}") for width in REPEAT}


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


@dataclass
class Region:
    """Where a buffer lies in the backing array."""

    name: str
    start: int
    size: int
    buffer: Buffer | None = field(default=None, repr=False)

    @property
    def address(self) -> int:
        return BASE_ADDRESS + self.start


class Memory:
    """The address space of one launch."""

    def __init__(self, buffers: list[Buffer], kernarg_size: int) -> None:
        self.regions: list[Region] = []
        place = _GAP
        for number, buffer in enumerate(buffers):
            region = Region(buffer.name or f"argument {number}", place, buffer.array.nbytes, buffer)
            self.regions.append(region)
            place += _up(buffer.array.nbytes, _ALIGNMENT) + _GAP
        self.kernarg = Region("kernel arguments", place, kernarg_size)
        self.regions.append(self.kernarg)
        self.size = place + _up(kernarg_size, _ALIGNMENT) + _GAP
        self.data = np.zeros(self.size, np.uint8)
        self.shadow = np.zeros(self.size, np.uint8)
        self._data, self._shadow = views(self.data), views(self.shadow)
        for region in self.regions:
            self._place(region)

    def _place(self, region: Region) -> None:
        span = slice(region.start, region.start + region.size)
        buffer = region.buffer
        if buffer is not None and buffer.known is not None:
            self.shadow[span] = _MAPPED | _INITIALISED * buffer.known.astype(np.uint8)
        elif buffer is None or buffer.initialised:
            self.shadow[span] = _MAPPED | _INITIALISED
        else:
            self.shadow[span] = _MAPPED
        if buffer is not None:
            self.data[span] = buffer.array.reshape(-1).view(np.uint8)

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
            span = slice(region.start, region.start + region.size)
            written = self.shadow[span] & _WRITTEN
            if region.buffer.known is not None:
                region.buffer.known |= written != 0
            if written.any():
                region.buffer.array.reshape(-1).view(np.uint8)[:] = self.data[span]
            if region.buffer.must_write and not written.all():
                missing = np.flatnonzero(written == 0)
                raise UnwrittenOutput(
                    f"{len(missing)} of {region.size} bytes of {region.name} were never written, the first at offset "
                    f"{int(missing[0])}.",
                    hint="Look for a mask or a grid that misses the tail.",
                )

    def load(self, addresses: NDArray[np.uint64], element: int, count: int, where: int) -> NDArray[np.unsignedinteger]:
        """Elements of 1, 2 or 4 bytes at `addresses` (any shape); the answer has a leading axis of `count`."""
        index = self._index(addresses, element, count, where)
        found: NDArray[Any] = self._data[element][index]
        wanted = REPEAT[element] * _INITIALISED
        shadow = self._shadow[element][index]
        if ((shadow & wanted) != wanted).any():
            self._explain(addresses, element, count, where, "reads")
        return found

    def store(self, addresses: NDArray[np.uint64], values: NDArray[Any], element: int, where: int) -> None:
        """`values` has a leading axis: consecutive elements from each address on."""
        index = self._index(addresses, element, len(values), where)
        wanted = REPEAT[element] * _MAPPED
        if ((self._shadow[element][index] & wanted) != wanted).any():
            self._explain(addresses, element, len(values), where, "writes")
        self._data[element][index] = values
        self._shadow[element][index] = REPEAT[element] * _ALL

    def _index(self, addresses: NDArray[np.uint64], element: int, count: int, where: int) -> NDArray[np.int64]:
        offsets: NDArray[np.int64] = addresses.view(np.int64) - BASE_ADDRESS
        if not offsets.size:
            return np.zeros((count, 0), np.int64)
        if offsets.min() < 0 or offsets.max() + element * count > self.size:
            bad = offsets[(offsets < 0) | (offsets + element * count > self.size)]
            raise self._outside(int(bad[0]), element * count, where)
        if element > 1:
            if (offsets & (element - 1)).any():
                bad = addresses[(offsets & (element - 1)) != 0]
                raise MisalignedAccess(
                    f"An access of {element * count} bytes at {int(bad[0]):#x} is not aligned to {element} bytes.",
                    address=where,
                )
            offsets = offsets >> (element.bit_length() - 1)
        if count == 1:
            return offsets[None]
        return offsets + np.arange(count, dtype=np.int64).reshape(-1, *([1] * offsets.ndim))

    def _outside(self, offset: int, size: int, where: int) -> OutOfBounds:
        nearest = min(self.regions, key=lambda r: max(r.start - offset, offset - (r.start + r.size - 1), 0))
        return OutOfBounds(
            f"An access of {size} bytes at {BASE_ADDRESS + offset:#x} lies in no buffer: the nearest is {nearest.name} "
            f"({nearest.size} bytes), and the access is at offset {offset - nearest.start} of it.",
            address=where,
            hint="Look for an index that runs past the end, or a mask that is missing.",
        )

    def _explain(self, addresses: NDArray[np.uint64], element: int, count: int, where: int, verb: str) -> None:
        for address in addresses.reshape(-1).tolist():
            offset = address - BASE_ADDRESS
            shadow = self.shadow[offset : offset + element * count]
            if not (shadow & _MAPPED).all():
                raise self._outside(offset, element * count, where)
            if not (shadow & _INITIALISED).all() and verb == "reads":
                region = next(r for r in self.regions if r.start <= offset < r.start + r.size)
                raise UninitialisedRead(
                    f"The kernel reads byte {offset - region.start} of {region.name}, which nothing has written.",
                    address=where,
                )


def _up(value: int, step: int) -> int:
    return (value + step - 1) // step * step
