"""Whether the replaced forwards may do their work now: settled before every call of the UNet, read by every block."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rocm_sd.integrations.a1111 import messages

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PERMISSION", "Permission"]

# A GPU's allocator, and the host's. By words: this module is imported where torch may be missing.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory")


class Permission:
    """The host makes one picture at a time, so there is one of these.

    `unet`: why the UNet's blocks run as the host has them, or None. `attention`: whether attention is nothing but its
    weights and softmax now. `whole`: within a call that is captured as a whole; a transformer block of separate
    launches is no faster than the host's own. `broken`: what went wrong; nothing is retried before `reset`.
    """

    def __init__(self) -> None:
        self.unet: str | None = None
        self.attention = True
        self.whole = False
        self.broken: str | None = None

    def fail(self, part: str, error: BaseException) -> None:
        """Say it, and try no more. Memory that has run out is another matter: a smaller picture may fit."""
        if isinstance(error, MemoryError) or any(words in str(error).lower() for words in _OUT_OF_MEMORY):
            messages.say(f"{part} found too little memory: fallback to the host's own.")
            return
        reason = (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
        self.broken = f"{part} failed: fallback to the host's own from now on ({reason}). Pictures are as without it."
        messages.say(self.broken)

    def reset(self) -> None:
        self.unet, self.broken, self.attention = None, None, True

    @contextmanager
    def a_whole_call(self) -> Iterator[None]:
        before, self.whole = self.whole, True
        try:
            yield
        finally:
            self.whole = before


PERMISSION = Permission()
