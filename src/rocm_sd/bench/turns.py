"""What a run of engines in turns keeps: their pipelines, why one failed, and how much is done."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

from rocm_sd import engine
from rocm_sd.bench.gate import PICTURES, STEPS, free_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    # Done, total, and what is under way.
    Progress = Callable[[float, float, str], object]

__all__ = ["Effort", "Failed", "Pipelines", "failure_line", "forget_compiled", "is_short", "without_folders"]

# An engine may need more than the one before it, and torch's allocator leaves gaps.
_ROOM = 1.25
_FOLDERS = re.compile(r"(?:[A-Za-z]:)?(?:[\\/][\w.~@+-]+)+[\\/](?=[\w.~@+-])")
# Pictures, about.
_SETTLING = 4
_GATES_OWN = 3


class Pipelines:
    """All at once or, where memory is short, one at a time; by engine's name.

    `make(name)` gives one that is ready and warm, after it was given up to make room.
    """

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
    """Whether there is too little memory left for one more, of the size of the last one."""
    free = engine.free_memory(device)
    return free is not None and last_mib is not None and free < _ROOM * last_mib * 2**20


def forget_compiled() -> None:
    """Compiled code would keep its pipelines, and torch's limit of recompilations counts it."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    free_memory()


class Failed(Exception):
    """Of one engine, in text: once it is handled, no frame of the error keeps the memory of the engine."""

    def __init__(self, name: str, error: BaseException) -> None:
        super().__init__(name)
        self.engine, self.why, self.is_short_of_memory = name, failure_line(error), engine.is_out_of_memory(error)


def failure_line(error: BaseException) -> str:
    """One line: what a user reads in a table. Folders are not named in a record."""
    lines = without_folders(str(error)).strip().splitlines()
    kind = "out of memory" if engine.is_out_of_memory(error) else type(error).__name__
    return f"{kind}: {lines[0][:200]}" if lines else kind


def without_folders(text: str) -> str:
    return _FOLDERS.sub("", text)


class Effort:
    """How much of a run is done, in steps of one picture: then a bar's estimate holds for every stage.

    Shares are of one engine and one picture of the batch; `gate` is that of a batch size, before any engine.

    `anew`: pictures that a pipeline draws when it is made ready again for its turn.
    """

    def __init__(
        self, steps: int, engines: int, batches: Sequence[int], repeats: int, anew: int, progress: Progress | None
    ) -> None:
        self._engines, self._batches, self._repeats, self._progress = engines, tuple(batches), repeats, progress
        self.picture = steps
        self.check = PICTURES * min(STEPS, steps)
        self.gate = _GATES_OWN * self.check
        self.settling = _SETTLING * steps
        self.anew = anew * steps
        of_an_engine = self.check + 2 * self.picture + self.settling + repeats * self.picture
        self._of_a_batch = self.gate + engines * of_an_engine
        self._total = float(sum(self._batches) * self._of_a_batch)
        self._done = 0.0

    def card(self, batch: int) -> int:
        """For its own time. The last batch size is warm already."""
        return self.picture if batch == self._batches[-1] else 2 * self.picture + self.settling

    def expect_card_times(self) -> None:
        self._total += sum(batch * self._engines * self.card(batch) for batch in self._batches)

    def expect_one_at_a_time(self, batch: int) -> None:
        self._total += batch * self._engines * self._repeats * self.anew

    def advance(self, by: float, what: str) -> None:
        self._reach(self._done + by, what)

    def finish_batch(self, batch: int) -> None:
        """Also what was skipped or known before."""
        so_far = self._batches[: self._batches.index(batch) + 1]
        self._reach(sum(so_far) * self._of_a_batch, f"batch {batch}")

    def finish(self) -> None:
        self._reach(self._total, "done")

    def _reach(self, done: float, what: str) -> None:
        self._done = min(max(self._done, done), self._total)
        if self._progress:
            self._progress(self._done, self._total, what)
