"""The pipelines that take turns: all of them at once or, where memory is short, one at a time."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rocm_sd import engine
from rocm_sd.bench.gate import free_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["Pipelines", "forget_compiled", "is_short"]

# An engine may need more than the one before it, and torch's allocator leaves gaps.
_ROOM = 1.25


class Pipelines:
    """By engine's name. `make(name)` gives one that is ready and warm, after it was given up to make room."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        self._make = make
        self._kept: dict[str, Any] = {}
        self.names: list[str] = []
        self.one_at_a_time = False

    @property
    def kept(self) -> dict[str, Any]:
        """Those that can be used at once."""
        return dict(self._kept)

    def add(self, name: str, pipe: Any) -> None:
        self._kept[name] = pipe
        self.names.append(name)

    def of(self, name: str) -> Any:
        if name not in self._kept:
            if self.one_at_a_time:
                self.give_up()
            self._kept[name] = self._make(name)
        return self._kept[name]

    def remove(self, name: str) -> None:
        self._kept.pop(name, None)
        self.names.remove(name)

    def give_up(self) -> None:
        """What is kept is made anew when it is asked for; what failed may have left compiled code."""
        self._kept.clear()
        forget_compiled()


def is_short(device: torch.device, last_mib: float | None) -> bool:
    """Whether there is too little memory beside what is kept for one more, of the size of the last one."""
    free = engine.free_memory(device)
    return free is not None and last_mib is not None and free < _ROOM * last_mib * 2**20


def forget_compiled() -> None:
    """Compiled code would keep its pipelines, and torch's limit of recompilations counts it."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    free_memory()
