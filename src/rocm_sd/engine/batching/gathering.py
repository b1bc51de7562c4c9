"""One thread runs what other threads ask for, several at once where they agree.

Those that wait longest are first. What fails together is run in halves, so that whoever is at fault fails alone. Where
it cannot be said who is next, all that wait fail, and those that come later are run.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

__all__ = ["Closed", "Gathering", "Waiting"]

Item = TypeVar("Item")
Result = TypeVar("Result")


class Closed(Exception):
    """It runs nothing any more."""


@dataclass(eq=False)
class Waiting(Generic[Item, Result]):
    """`key`: those with the same one are run together; None is by itself. `weight`: what it counts of the most."""

    item: Item
    key: Hashable | None
    weight: int
    since: float = field(default_factory=time.monotonic)
    done: Future[Result] = field(default_factory=Future)


class Gathering(Generic[Item, Result]):
    """`run(items)` gives a result for each, on one thread of its own. `most`: the weight of what is run at once; what
    is heavier is run by itself. `patience(waiting)`: how many seconds the first of them waits for more, at most; asked
    again whenever something changes. `first(waiting)`: who is next, where that is not who has waited longest.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[list[Item]], Sequence[Result]],
        *,
        most: int,
        patience: Callable[[Sequence[Waiting[Item, Result]]], float] = lambda _waiting: 0.0,
        first: Callable[[Sequence[Waiting[Item, Result]]], Waiting[Item, Result]] = lambda waiting: waiting[0],
    ) -> None:
        self.most = most
        self._run_items = run
        self._patience, self._chosen = patience, first
        self._waiting: list[Waiting[Item, Result]] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def ask(self, item: Item, key: Hashable | None = None, weight: int = 1) -> Result:
        """Wait for its turn, and for its result."""
        mine: Waiting[Item, Result] = Waiting(item, key, weight)
        with self._changed:
            if self._closed:
                raise Closed
            self._waiting.append(mine)
            self._changed.notify()
        return mine.done.result()

    def look_again(self) -> None:
        """What patience depends on has changed."""
        with self._changed:
            self._changed.notify()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        """Whatever waits, and whoever asks from now on, gets `Closed`; what runs ends."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _loop(self) -> None:
        while (batch := self._next()) is not None:
            self._run(batch)

    def _next(self) -> list[Waiting[Item, Result]] | None:
        with self._changed:
            while True:
                if self._closed:
                    for one in self._waiting:
                        one.done.set_exception(Closed())
                    self._waiting.clear()
                    return None
                left = 0.0
                try:
                    batch = self._first()
                    if batch:
                        left = batch[0].since + self._patience(batch) - time.monotonic()
                except BaseException as error:  # noqa: BLE001 -- nobody would ever be answered without this thread
                    for one in self._waiting:
                        one.done.set_exception(error)
                    self._waiting.clear()
                    continue
                if batch and (left <= 0 or sum(one.weight for one in batch) >= self.most):
                    self._waiting = [one for one in self._waiting if one not in batch]
                    return batch
                self._changed.wait(left if batch else None)

    def _first(self) -> list[Waiting[Item, Result]]:
        """Who is next, and those that can be run with it."""
        if not self._waiting:
            return []
        first = self._chosen(self._waiting)
        batch, weight = [first], first.weight
        for one in self._waiting:
            agrees = one is not first and one.key is not None and one.key == first.key
            if agrees and weight + one.weight <= self.most:
                batch.append(one)
                weight += one.weight
        return batch

    def _run(self, batch: list[Waiting[Item, Result]]) -> None:
        try:
            results = self._run_items([one.item for one in batch])
            assert len(results) == len(batch)
        except BaseException as error:  # noqa: BLE001 -- it is raised where it was asked for
            if len(batch) == 1:
                batch[0].done.set_exception(error)
                return
            results = ()
        if results:
            for one, result in zip(batch, results, strict=True):
                one.done.set_result(result)
            return
        # Not while the error is at hand: its frames hold the memory that may just have run out.
        half = len(batch) // 2
        self._run(batch[:half])
        self._run(batch[half:])
