"""How much of a run is done, in steps of one picture: then a bar's estimate holds for every stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_sd.bench.gate import PICTURES, STEPS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    # Done, total, and what is under way.
    Progress = Callable[[float, float, str], object]

__all__ = ["Effort"]

_SETTLING = 4  # pictures, about
_GATES_OWN = 3


class Effort:
    """Shares are of one engine and one picture of the batch; `gate` is that of a batch size, before any engine.

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
        engine = self.check + 2 * self.picture + self.settling + repeats * self.picture
        self._of_a_batch = self.gate + engines * engine
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
        """Also what was left out or known before."""
        so_far = self._batches[: self._batches.index(batch) + 1]
        self._reach(sum(so_far) * self._of_a_batch, f"batch {batch}")

    def finish(self) -> None:
        self._reach(self._total, "done")

    def _reach(self, done: float, what: str) -> None:
        self._done = min(max(self._done, done), self._total)
        if self._progress:
            self._progress(self._done, self._total, what)
