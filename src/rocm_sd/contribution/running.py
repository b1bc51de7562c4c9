"""Run the parts of a contribution within a budget: a crash, a hang or a lack of memory costs one unit, and is recorded.

A unit is what one process is asked for: a check, an implementation of an op, a workload. Each is kept as soon as it is
found. One that the time does not suffice for is skipped, and is not kept: a later run may have more.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rocm_sd.bench.card_report import FAILED, PASSED, SKIPPED, Item, Part, state_of
from rocm_sd.contribution.attempts import OUT_OF_TIME, PROGRESS, attempt, failed
from rocm_sd.contribution.keeping import Found
from rocm_sd.files import read_text
from rocm_sd.workers import Pool, WorkerFailed, WorkerLost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rocm_sd.contribution.keeping import Kept

    # Seconds that are done and all that are expected, by the plan, and what is under way.
    Progress = Callable[[float, float, str], object]
    # Of a part that is over, in one sentence.
    Summary = Callable[[Sequence[Item]], str]

__all__ = ["PlannedPart", "Run", "Unit", "plain_summary"]

_POLLED_EVERY_S = 0.2
# A unit that is not half done by the time that it takes elsewhere is not worth its beginning.
_WORTH_BEGINNING = 0.5
# Who has said nothing for so long is not slow: it hangs.
_SILENT_S = 60.0


@dataclass(frozen=True)
class Unit:
    """`work(*arguments)` gives a Found; it may be named as "module:function", and is then imported where it runs: here,
    in a worker, or in a program that has workers of its own.

    `limit_s`: a hang is ended after that. `expected_s`: what it takes on a healthy card.
    """

    name: str
    work: Callable[..., Found] | str
    arguments: tuple[Any, ...] = ()
    limit_s: float = 120.0
    expected_s: float = 3.0
    place: Literal["here", "worker", "program"] = "worker"


@dataclass(frozen=True)
class PlannedPart:
    """`name` as in the file, `title` as it is shown while it runs."""

    name: str
    title: str
    units: tuple[Unit, ...]
    summary: Summary


def plain_summary(items: Sequence[Item]) -> str:
    """Such as: 38 of 40 passed."""
    ran = [item for item in items if item.state != SKIPPED]
    cut = sum(item.reason.startswith(OUT_OF_TIME) for item in items)
    if not ran and not cut:
        return "; ".join(dict.fromkeys(item.reason for item in items)) or "there is nothing to run here"
    words = f"{sum(item.state == PASSED for item in ran)} of {len(ran)} passed"
    return f"{words}; {cut} not run: {OUT_OF_TIME}" if cut else words


@dataclass
class Run:
    """`parts()` runs what is not kept yet. `complete`: nothing was skipped for lack of time."""

    kept: Kept
    budget_s: float
    progress: Progress = lambda _done, _total, _what: None
    on_part: Callable[[Part], object] = lambda _part: None
    complete: bool = True
    _done_s: float = 0.0
    _total_s: float = 0.0
    _end: float = 0.0
    _pools: dict[str, Pool] = field(default_factory=dict)

    def parts(self, planned: Sequence[PlannedPart]) -> tuple[Part, ...]:
        self._end = time.monotonic() + self.budget_s
        todo = [u for part in planned for u in part.units if self.kept.found(part.name, u.name) is None]
        self._done_s, self._total_s = 0.0, sum(unit.expected_s for unit in todo)
        over = []
        try:
            for part in planned:
                over.append(self._part(part))
                self.on_part(over[-1])
        finally:
            self._close()
        return tuple(over)

    def _part(self, part: PlannedPart) -> Part:
        items: list[Item] = []
        records: list[dict[str, Any]] = []
        data: dict[str, Any] = {}
        seconds = 0.0
        for unit in part.units:
            found = self._unit(part, unit)
            items += found.items
            records += found.records
            for name, value in found.data.items():
                data[name] = {**data[name], **value} if isinstance(data.get(name), dict) else value
            seconds += self.kept.seconds(part.name, unit.name)
        # Nothing of one part is in the memory of the card while the next one runs.
        self._close()
        state = state_of(items)
        return Part(part.name, state, part.summary(items), tuple(items), round(seconds, 2), tuple(records), data)

    def _unit(self, part: PlannedPart, unit: Unit) -> Found:
        known = self.kept.found(part.name, unit.name)
        if known is not None:
            return known
        if self.kept.was_its_end(part.name, unit.name):
            why = "the whole program ended twice while this ran: it was killed, or the machine went down"
            found = failed(unit.name, why)
            self.kept.finish(part.name, unit.name, found, 0.0)
            return found
        left = self._end - time.monotonic()
        if unit.expected_s and left < _WORTH_BEGINNING * unit.expected_s:
            return self._cut(unit, "before it was begun")
        self.kept.begin(part.name, unit.name)
        begun = time.monotonic()
        try:
            found, is_cut = self._tried(part, unit, max(left, unit.expected_s))
        except KeyboardInterrupt:
            self.kept.give_up(part.name, unit.name)
            raise
        seconds = time.monotonic() - begun
        if is_cut:
            self.kept.give_up(part.name, unit.name)
            return self._cut(unit, found.items[0].reason)
        if any(item.reason.startswith(OUT_OF_TIME) for item in found.items):
            self.complete = False
            self.kept.give_up(part.name, unit.name)
            self._done_s += unit.expected_s
            return found
        found = _with_seconds(found, seconds)
        self.kept.finish(part.name, unit.name, found, seconds)
        self._done_s += unit.expected_s
        return found

    def _cut(self, unit: Unit, how: str) -> Found:
        self.complete = False
        self._done_s += unit.expected_s
        return Found((Item(unit.name, SKIPPED, f"{OUT_OF_TIME} {how}"),))

    def _tried(self, part: PlannedPart, unit: Unit, left: float) -> tuple[Found, bool]:
        """What it found, and whether only its time was cut."""
        self.progress(self._done_s, self._total_s, f"{part.title}: {unit.name}")
        if unit.place == "here":
            return attempt(str(self.kept.folder), left, unit.name, unit.work, *unit.arguments), False
        limit = min(unit.limit_s, left)
        (self.kept.folder / PROGRESS).unlink(missing_ok=True)
        watched = _Watched(self, part, unit)
        try:
            found = self._asked(unit, limit, watched)
        except WorkerLost as lost:
            hung = lost.message.startswith("hung")
            what = f"; it was at: {watched.what}" if watched.what else ""
            # It was not at the end of its own limit, and went on until then.
            slow = hung and limit < unit.limit_s and watched.silent_s < _SILENT_S
            why = f"after {limit:.0f} s{what}" if slow else _explained(lost.message) + what
            return failed(unit.name, why), slow
        except WorkerFailed as error:
            return failed(unit.name, error.message), False
        if state_of(found.items) == FAILED:
            # A GPU that met a fault gives every later call of the process the same error.
            self._close()
        return found, False

    def _asked(self, unit: Unit, limit: float, watched: _Watched) -> Found:
        if unit.place not in self._pools:
            self._close()
            self._pools[unit.place] = Pool(1, program=unit.place == "program")
        given = (str(self.kept.folder), limit, unit.name, unit.work, *unit.arguments)
        future = self._pools[unit.place].submit(attempt, *given, timeout=limit)
        try:
            while not future.done():
                wait([future], timeout=_POLLED_EVERY_S)
                watched.look()
            return future.result()
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


class _Watched:
    """What a unit in another process says of its progress; one that says nothing is as far as its time."""

    def __init__(self, run: Run, part: PlannedPart, unit: Unit) -> None:
        self._run, self._part, self._unit = run, part, unit
        self._file = run.kept.folder / PROGRESS
        self._begun = self._heard = time.monotonic()
        self.what, self._said, self._share = "", "", 0.0

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._heard

    def look(self) -> None:
        said = read_text(self._file)
        share = min(0.95, (time.monotonic() - self._begun) / max(self._unit.expected_s, 0.1))
        if said != self._said:
            self._said, self._heard = said, time.monotonic()
        with suppress(ValueError):
            share, self.what = json.loads(self._said)
        # What is known late may be less than what was guessed: a bar does not go back.
        self._share = share = max(share, self._share)
        title = f"{self._part.title}: {self._unit.name}"
        shown = f"{title}, {self.what}" if self.what else title
        run = self._run
        run.progress(run._done_s + share * self._unit.expected_s, run._total_s, shown)  # noqa: SLF001 -- they are one


def _explained(message: str) -> str:
    return message.replace("by signal 9", "by signal 9 (it was killed, most likely for lack of memory)")


def _with_seconds(found: Found, seconds: float) -> Found:
    """The whole time, where the unit is one item that has none of its own."""
    if len(found.items) != 1 or found.items[0].seconds:
        return found
    item = found.items[0]
    return Found(
        (Item(item.name, item.state, item.reason, round(seconds, 2), item.figures),), found.records, found.data
    )
