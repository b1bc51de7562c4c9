"""Local memory of workgroups, with a shadow that finds races between waves.

Each byte has shadow bytes: whether a byte was ever written, which wave wrote it and which read it since the last
barrier (0: none, n + 1: wave n, 255: several). They are looked up in words as wide as the access, so a check costs one
gather. Reads are only noted down; they are entered into the shadow when a store of the same epoch needs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rocm_sd.verify.emulator.errors import LdsRace, MisalignedAccess, OutOfBounds, UninitialisedRead
from rocm_sd.verify.emulator.memory import REPEAT, views

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Lds", "LdsAccess"]

_SEVERAL = 255


@dataclass(eq=False)
class LdsAccess:
    """One instruction's reads or writes: for each lane its workgroup, its wave number within it, and byte addresses."""

    workgroups: NDArray[np.int64]
    waves: NDArray[np.int64]
    addresses: NDArray[np.int64]
    element: int
    count: int
    stores: bool
    epochs: NDArray[np.int64] | None = None

    @property
    def owner(self) -> NDArray[Any]:
        """The shadow of each lane's element: its wave in every byte."""
        return ((self.waves + 1) * REPEAT[self.element]).astype(f"u{self.element}")

    def only(self, keep: NDArray[np.bool_]) -> LdsAccess:
        kept = self.workgroups[keep], self.waves[keep], self.addresses[keep]
        return LdsAccess(*kept, self.element, self.count, self.stores)


class Lds:
    """The LDS of every workgroup at hand."""

    def __init__(self, workgroups: int, size: int) -> None:
        self.size = size
        self.stride = max((size + 15) // 16 * 16, 16)
        self.reset(workgroups)

    def reset(self, workgroups: int) -> None:
        """Forget everything: a new workgroup finds no value that it may rely on."""
        total = workgroups * self.stride
        self._data, self._written, self._writer, self._reader = (views(np.zeros(total, np.uint8)) for _ in range(4))
        self.epochs = np.zeros(workgroups, np.int64)
        self._dirty = np.zeros(workgroups, np.bool_)
        self._log: list[LdsAccess] = []

    def load(self, access: LdsAccess, where: int) -> NDArray[Any]:
        """Elements of shape [count, lanes]."""
        index = self._index(access, where)
        element = access.element
        if (self._written[element][index] != REPEAT[element]).any():
            missing = access.addresses[(self._written[element][index] != REPEAT[element]).any(axis=0)]
            raise UninitialisedRead(
                f"The kernel reads LDS byte {int(missing[0])}, which nothing has written.", address=where
            )
        if self._dirty.any():
            owner = access.owner
            writer = self._writer[element][index]
            self._compare(access, writer, (writer != 0) & (writer != owner), where, "reads", "wrote")
        access.epochs = self.epochs[access.workgroups]
        self._log.append(access)
        found: NDArray[Any] = self._data[element][index]
        return found

    def store(self, access: LdsAccess, values: NDArray[Any], where: int) -> None:
        """`values` has the shape [count, lanes]."""
        index = self._index(access, where)
        element = access.element
        owner = access.owner
        self._enter_reads()
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
        self._dirty[access.workgroups] = True

    def barrier(self, workgroups: NDArray[np.int64], unfinished: list[LdsAccess]) -> None:
        """A new epoch. What was not waited for before the barrier may still happen after it, and is carried over."""
        chosen = np.unique(workgroups)
        self.epochs[chosen] += 1
        if len(chosen) == len(self.epochs):
            self._log.clear()
        stale = chosen[self._dirty[chosen]]
        for shadow in (self._writer[1], self._reader[1]):
            rows = shadow.reshape(-1, self.stride)
            rows[stale] = 0
        self._dirty[chosen] = False
        for access in unfinished:
            if access.stores:
                index = self._index(access, 0)
                self._writer[access.element][index] = np.broadcast_to(access.owner, index.shape)
                self._dirty[access.workgroups] = True
            else:
                access.epochs = self.epochs[access.workgroups]
                self._log.append(access)

    def _enter_reads(self) -> None:
        log, self._log = self._log, []
        for access in log:
            assert access.epochs is not None
            current = access.epochs == self.epochs[access.workgroups]
            live = access if current.all() else access.only(current)
            if not len(live.addresses):
                continue
            base = live.workgroups * self.stride + live.addresses
            index = base + np.arange(live.element * live.count)[:, None]
            owner = np.broadcast_to((live.waves + 1).astype(np.uint8), index.shape)
            before = self._reader[1][index]
            self._reader[1][index] = np.where((before == 0) | (before == owner), owner, _SEVERAL)
            after = self._reader[1][index]
            self._reader[1][index[after != owner]] = _SEVERAL
            self._dirty[live.workgroups] = True

    def _index(self, access: LdsAccess, where: int) -> NDArray[np.int64]:
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
        base = access.workgroups * self.stride + addresses >> (element.bit_length() - 1)
        return base + np.arange(access.count)[:, None]

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
