"""Names of memory instructions to what they do: `Transfer` for loads and stores, `Atomic` for atomic operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rocm_sd.verify.emulator import convert
from rocm_sd.verify.emulator.wave import vgpr_bits

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from rocm_sd.verify.emulator.memory import Memory

    Array = NDArray[Any]

__all__ = ["Atomic", "Transfer", "parse_atomic", "parse_transfer"]

_SIZES = {
    "u8": 1, "i8": 1, "b8": 1, "ubyte": 1, "sbyte": 1, "byte": 1,
    "u16": 2, "i16": 2, "b16": 2, "ushort": 2, "sshort": 2, "short": 2,
    "b32": 4, "dword": 4, "b64": 8, "dwordx2": 8, "b96": 12, "dwordx3": 12, "b128": 16, "dwordx4": 16,
}  # fmt: skip
_SIGNED = frozenset({"i8", "i16", "sbyte", "sshort"})


@dataclass(frozen=True)
class Transfer:
    """`element` bytes, `count` times. `half`: the 16-bit half of the register that is moved; None for the whole."""

    element: int
    count: int
    signed: bool
    half: int | None

    @property
    def size(self) -> int:
        return self.element * self.count

    def registers(self, first: int, family: str) -> int:
        """Bits of the registers it moves from `first` on; CDNA waits for whole ones."""
        return vgpr_bits(first, self.count, None if family == "gfx94x" else self.half)


def parse_transfer(words: str, *, loads: bool) -> Transfer | None:
    """d16_hi_b16, short_d16_hi, b128 and the like; None where the name is none of these."""
    parts = words.split("_")
    kinds = [part for part in parts if part not in ("d16", "hi")]
    if len(kinds) != 1 or kinds[0] not in _SIZES:
        return None
    size = _SIZES[kinds[0]]
    half = None
    if "d16" in parts:
        half = 1 if "hi" in parts else 0
    elif "hi" in parts:
        return None
    if not loads and half is None and size < 4:
        half = 0
    element = min(size, 4)
    return Transfer(element, size // element, kinds[0] in _SIGNED, half)


_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda old, given: old + given,
    "sub": lambda old, given: old - given,
    "min": np.fmin,
    "max": np.fmax,
    "and": lambda old, given: old & given,
    "or": lambda old, given: old | given,
    "xor": lambda old, given: old ^ given,
    "swap": lambda _old, given: given,
}
# CDNA writes the type before the operation, and the width after it.
_CDNA = {"smin": ("min", "i"), "umin": ("min", "u"), "smax": ("max", "i"), "umax": ("max", "u")}
_TYPES = frozenset({"u32", "i32", "b32", "f32", "u64", "i64", "b64", "f64", "pk_f16", "pk_bf16"})


@dataclass(frozen=True)
class Atomic:
    """An atomic operation on global memory. Lanes that meet at one address take turns, lowest wave and lane first.

    `kind` is the type that memory holds; a compare-and-swap takes the new value and then the one it compares.
    """

    operation: str
    kind: str

    @property
    def compares(self) -> bool:
        return self.operation == "cmpswap"

    @property
    def dwords(self) -> int:
        return 2 if self.kind.endswith("64") else 1

    def apply(self, memory: Memory, addresses: Array, given: Array, where: int) -> Array:
        """`given` is [operands, lanes]; the answer [dwords, lanes] is what memory held before each lane's turn."""
        before = np.zeros((self.dwords, len(addresses)), np.uint32)
        waiting = np.arange(len(addresses))
        while len(waiting):
            _, first = np.unique(addresses[waiting], return_index=True)
            turn = waiting[first]
            old = memory.load(addresses[turn], 4, self.dwords, where)
            memory.store(addresses[turn], self._combine(old, given[:, turn]), 4, where)
            before[:, turn] = old
            waiting = np.delete(waiting, first)
        return before

    def _combine(self, old: Array, given: Array) -> Array:
        size = self.dwords
        if self.compares:
            same = (old == given[size:]).all(axis=0)
            return np.where(same, given[:size], old)
        new = _OPERATIONS[self.operation](self._typed(old), self._typed(given[:size]))
        bits = convert.from_type(new, self.kind)
        return np.stack(convert.split64(bits)) if size == 2 else bits[None]

    def _typed(self, words: Array) -> Array:
        joined = convert.join64(words[0], words[1]) if self.dwords == 2 else np.ascontiguousarray(words[0])
        typed: Array = convert.to_type(joined, self.kind)
        return typed


def parse_atomic(words: str) -> Atomic | None:
    """add_u32, pk_add_f16, smax_x2, cmpswap_b64 and the like."""
    packed = words.startswith("pk_")
    operation, _, kind = words.removeprefix("pk_").removesuffix("_rtn").partition("_")
    kind = kind.removeprefix("num_")
    if operation in _CDNA:
        operation, letter = _CDNA[operation]
        kind = letter + ("64" if kind == "x2" else "32")
    elif kind in ("", "x2"):
        kind = "u64" if kind == "x2" else "u32"
    kind = f"pk_{kind}" if packed else kind
    if (operation not in _OPERATIONS and operation != "cmpswap") or kind not in _TYPES:
        return None
    return Atomic(operation, kind)
