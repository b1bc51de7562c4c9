"""Names of memory instructions to what they move: element size, count, sign extension and 16-bit halves."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Transfer", "parse_transfer"]

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
