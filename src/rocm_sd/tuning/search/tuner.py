"""The search itself: problems by their share of a picture, candidates by a strategy, everything stored as it comes.

Nothing depends on how a search ends. A candidate is stored when it was measured; stock is stored when the search of a
problem is complete, so a problem is complete where stock's is the newest of its measurements.
"""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rocm_sd import arch
from rocm_sd.measuring import LEAST_TURNS
from rocm_sd.ops import self_test
from rocm_sd.tuning import environment
from rocm_sd.tuning.choice import STOCK
from rocm_sd.tuning.entries import Entry, now, text
from rocm_sd.tuning.resolve import user_database
from rocm_sd.tuning.search.beside import (
    CompilingBeside,
    first_of_each,
    heads,
    is_compiled_apart,
    is_composed,
    is_plain,
)
from rocm_sd.tuning.search.candidates import Candidate, candidates, hash_of, operations
from rocm_sd.tuning.search.halving import Halving, Strategy
from rocm_sd.tuning.search.problems import Failure, Key, Neighbour, ProblemSearch, TuningResult, fast_nearby, weight
from rocm_sd.tuning.search.workbench import HUNG, OK, ask, measure_candidate, open_call, times_of
from rocm_sd.workers import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    import torch

    from rocm_sd.tuning.database import Database
    from rocm_sd.tuning.search.calls import Traced

    Ready = Callable[[ProblemSearch, Candidate], bool]

__all__ = ["Failure", "Tuner", "TunerOptions", "TunerProgress", "TuningResult"]

log = logging.getLogger("rocm_sd")

_LAST = 0.1  # of the budget: no candidate begins in it, the one under way may take it
_SEARCHED = 0.5  # of the budget: what is left to the search, however long it took to get there
_MOST_CONFIRMED = 6
_POLL_S = 0.02  # between looks at what was compiled
# A library's first call of a size may search among its algorithms, and compile them: MIOpen for minutes.
_LIBRARY_S = 600.0


@dataclass(frozen=True)
class TunerOptions:
    """Seconds: `budget_s` for all, `timeout_s` for one candidate, its compilation included.

    `confirmed` turns are enough that the best is not the luckiest. `shortlist`: where a neighbour was measured, no more
    than so many configs are tried, the fastest there first; None tries all.
    """

    budget_s: float
    timeout_s: float = 60.0
    strategy: Strategy = field(default_factory=Halving)
    fresh: bool = False
    confirmed: int = 24
    shortlist: int | None = None

    def quick(self) -> TunerOptions:
        """For a first look at every problem, or for all that a user waits for at a first picture."""
        return replace(self, strategy=Halving(first=4, growth=3, last=8, share=0.8), confirmed=8, shortlist=4)

    @property
    def is_quick(self) -> bool:
        return self.shortlist is not None


@dataclass(frozen=True)
class TunerProgress:
    """`share` of the whole, by time or by candidates, whichever is further; `best` of the problem under way."""

    share: float
    what: str
    best: str = ""


class Tuner:
    """`run` returns an outcome for every problem. After Ctrl-C `interrupted` is true, and what was measured is kept."""

    def __init__(
        self,
        device: torch.device,
        database: Database,
        options: TunerOptions,
        progress: Callable[[TunerProgress], object] = lambda _: None,
    ) -> None:
        self.device, self.database, self.options, self.progress = device, database, options, progress
        self._now = options  # of the pass under way
        self.environment = environment.current(device)
        self.interrupted = False
        self._lost: set[tuple[str, Candidate]] = set()
        self._begun = time.monotonic()
        self._done = self._total = 0
        self._elsewhere: list[Neighbour] = []

    def run(
        self, traced: Sequence[Traced], begun: float | None = None, worker: Worker | None = None
    ) -> list[TuningResult]:
        """`begun`, by the monotonic clock: since when the budget is being spent; now, unless given.

        `worker`: one that is there already, and stays.
        """
        self._begun = time.monotonic()
        if begun is not None:
            self._begun = max(begun, self._begun - (1 - _SEARCHED) * self.options.budget_s)
        searches = self._searches(traced)
        waiting = [search for search in searches if self.options.fresh or not search.is_settled]
        self._total = sum(len(search.candidates) for search in waiting)
        self._done = sum(self.is_known(search, c) for search in waiting for c in search.candidates)
        try:
            with Worker() if worker is None else nullcontext(worker) as measuring:
                self._search_while_compiling(waiting, searches, measuring)
        except KeyboardInterrupt:
            self.interrupted = True
        return [search.outcome() for search in searches]

    def is_known(self, search: ProblemSearch, candidate: Candidate) -> bool:
        """Whether it need not be measured in this run."""
        return search.is_known(candidate) and (candidate in search.turns or not self.options.fresh)

    @property
    def left_s(self) -> float:
        """The seconds until no further candidate is started."""
        return (1 - _LAST) * self.options.budget_s - self._spent_s

    @property
    def _spent_s(self) -> float:
        return time.monotonic() - self._begun

    def _searches(self, traced: Sequence[Traced]) -> list[ProblemSearch]:
        """Those that a picture spends most on come first; a setting of the whole pipeline comes before all.

        An op that is composed of others comes after them: its stock runs what was found for those.
        """
        known_ops, arch_name = operations(), arch.detect(self.device).name
        by_problem: dict[tuple[str, str], dict[Key, Entry]] = {}
        for entry in self.database.all(environment=self.environment):
            key = (entry.kernel_hash, entry.candidate, frozenset(entry.config.items()))
            by_problem.setdefault((entry.op, text(entry.problem)), {})[key] = entry
        found = []
        for each in traced:
            op, problem = known_ops[each.call.op], dict(each.call.problem)
            known = by_problem.pop((op.name, text(problem)), {})
            found.append(
                ProblemSearch(op, each, candidates(op, problem, self.device), known, weight(op, each), arch_name)
            )
        self._elsewhere = [
            Neighbour(op_name, next(iter(entries.values())).problem, entries)
            for (op_name, _), entries in by_problem.items()
        ]
        return sorted(found, key=lambda search: (search.op.composed, -search.weight))

    def _search_while_compiling(
        self, waiting: Sequence[ProblemSearch], searches: Sequence[ProblemSearch], worker: Worker
    ) -> None:
        """Kernels are compiled by processes that have no card, while others are measured.

        After a look at every problem, and a quick search of those that a picture spends most on, all of it is searched
        through, unless the search is to be quick: what has no time left is near its best already.
        """
        wanted = [
            (search.call, [c for c in self._in_order(search, searches) if _is_to_compile(search, c)], search.weight)
            for search in waiting
        ]
        self.progress(TunerProgress(self._share(), "compiling"))
        with CompilingBeside(wanted, self.device, self.left_s) as compiling:

            def ready(search: ProblemSearch, candidate: Candidate) -> bool:
                compiled = not candidate.config or compiling.is_ready(search.call, candidate)
                return compiled or search.is_known(candidate) or candidate in first_of_each(search)

            # What is compiled where it runs (HIP) is looked at first, too: each config takes seconds.
            on_gpu = self.device.type != "cpu"
            if self.options.is_quick or on_gpu or any(candidates for _, candidates, _ in wanted):
                self._now = self.options if self.options.is_quick else self.options.quick()
                # Of no weight is what a library may search for minutes.
                weighty = [search for search in waiting if search.weight]
                self._look_over(weighty, worker, compiling)
                self._say_how_far("looked over", waiting)
                self._search_each(_by_cost(weighty), searches, worker, ready)
                self._say_how_far("searched quickly", waiting)
            self._now = self.options
            if not self.options.is_quick:
                self._search_through(waiting, searches, worker, compiling)
                self._say_how_far("searched through", waiting)

    def _look_over(self, waiting: Sequence[ProblemSearch], worker: Worker, compiling: CompilingBeside) -> None:
        """Each problem by what needs no compiler, then by what has no config and by one that has, as they are compiled:
        after that what a picture spends on each is known.
        """
        for search in waiting:
            self._try(search, [c for c in search.others if is_plain(search.op, c)], worker)
        over = False
        while not over and self.left_s > 0:
            first = [(search, heads(search, compiling)) for search in waiting]
            over = compiling.is_over or not any(each for _, each in first)
            for search, each in first:
                self._try(search, [c for c in each if compiling.is_ready(search.call, c)], worker)
            time.sleep(_POLL_S)
        for search in waiting:
            self._try(search, [c for c in search.others if is_composed(search.op, c)], worker)

    def _search_through(
        self, waiting: Sequence[ProblemSearch], searches: Sequence[ProblemSearch], worker: Worker,
        compiling: CompilingBeside,
    ) -> None:  # fmt: skip
        """All candidates, in the order in which they are compiled; what could not be compiled ahead comes last."""
        todo, over = list(waiting), False

        def ready(search: ProblemSearch, candidate: Candidate) -> bool:
            return over or not _is_to_compile(search, candidate) or compiling.is_ready(search.call, candidate)

        while self.left_s > 0:
            over = compiling.is_over
            self._search_each(_by_cost(todo), searches, worker, ready)
            todo = [each for each in waiting if not all(self.is_known(each, c) for c in each.others)]
            if over or not todo:
                return
            todo = [each for each in todo if any(ready(each, c) and not self.is_known(each, c) for c in each.others)]
            time.sleep(_POLL_S)

    def _search_each(
        self, waiting: Sequence[ProblemSearch], searches: Sequence[ProblemSearch], worker: Worker, ready: Ready
    ) -> None:
        """`ready`: which candidates can be tried by now; the others are left out."""
        for number, search in enumerate(waiting):
            if self.left_s <= 0:
                break
            others = self._in_order(search, searches, ready)
            self._search(search, others, worker, self._allotted(waiting[number:]))
        for search in waiting:
            self._judge_composed_anew(search, worker)

    def _judge_composed_anew(self, search: ProblemSearch, worker: Worker) -> None:
        """What it calls may have been searched after it, and is faster by now."""
        composed = [c for c in search.others if is_composed(search.op, c) and search.entry(c) is not None]
        measure, complete = _Measure(self, search, worker, self.left_s), search.is_complete
        for candidate in composed:
            measure.anew(candidate, self._now.confirmed)
        if composed and complete:
            measure.anew(Candidate(STOCK), self._now.confirmed)

    def _try(self, search: ProblemSearch, several: Sequence[Candidate], worker: Worker) -> None:
        measure = _Measure(self, search, worker, self.left_s)
        for candidate in several:
            if self.left_s > 0 and not self.is_known(search, candidate):
                measure.anew(candidate, LEAST_TURNS)

    def _in_order(
        self, search: ProblemSearch, all_searches: Sequence[ProblemSearch], ready: Ready = lambda _search, _c: True
    ) -> list[Candidate]:
        """What is to be tried, stock apart: what is fast at neighbours comes first, after what the data name."""
        near = fast_nearby(search, [*(other.as_neighbour for other in all_searches), *self._elsewhere])
        first = dict.fromkeys([Candidate(STOCK), *([search.shipped] if search.shipped else []), *near])
        found = [*(c for c in first if c in search.candidates), *(c for c in search.candidates if c not in first)]
        search.candidates[:] = found
        others = [c for c in search.others if ready(search, c)]
        if near and self._now.shortlist is not None:
            configured = [c for c in others if c.config][: self._now.shortlist]
            others = [c for c in others if not c.config or c in configured]
        return others

    def _allotted(self, waiting: Sequence[ProblemSearch]) -> float:
        """Seconds for the first of those that wait: its share of what they cost, and at least half an equal one."""
        costs = [search.cost * len(search.candidates) for search in waiting]
        share = costs[0] / sum(costs) if sum(costs) else 1.0
        return self.left_s * max(share, 0.5 / len(waiting))

    def _search(self, search: ProblemSearch, others: Sequence[Candidate], worker: Worker, seconds: float) -> None:
        measure = _Measure(self, search, worker, seconds)
        stock = Candidate(STOCK)
        if others:
            self._now.strategy.search(others, measure)
            self._confirm(search, measure)
            self._compare_with_shipped(search, measure)
        complete = all(search.entry(candidate) is not None for candidate in search.others)
        if complete and not search.unchecked and self._spent_s < self.options.budget_s:
            # Whatever was measured before: it must be the newest now.
            measure.anew(stock, self._now.confirmed)

    def _confirm(self, search: ProblemSearch, measure: _Measure) -> None:
        """Time the best again until it is one that was timed often: the least of many few turns is mostly luck."""
        for _ in range(_MOST_CONFIRMED):
            best = search.fastest()
            if best is None or search.turns.get(best, 0) >= self._now.confirmed or self.left_s <= 0:
                return
            measure.anew(best, self._now.confirmed)

    def _compare_with_shipped(self, search: ProblemSearch, measure: _Measure) -> None:
        """What the data name stays unless another is faster beyond doubt: its time has to be as sure as the best's."""
        shipped = search.shipped
        if shipped is None or search.turns.get(shipped, 0) >= self._now.confirmed or self.left_s <= 0:
            return
        if search.fastest() != shipped:
            measure.anew(shipped, self._now.confirmed)

    def measured(self, search: ProblemSearch, candidate: Candidate, worker: Worker, turns: int) -> Entry | None:
        """One candidate, stored at once; None where its time was cut by the end of the budget."""
        within = self.options.budget_s - self._spent_s
        if within <= 0:
            return None
        self._report(search, candidate)
        if (search.op.name, candidate) in self._lost:
            # Each of its problems would cost as many seconds, or the start of a worker. A later run tries it there.
            failed = {"failed": f"{HUNG} or crashed at another size: not tried here"}
            return search.entry(candidate) or self.store(search, candidate, failed)
        # What stock's library does at the first call of a size is not held against a candidate.
        answer = ask(worker, open_call, search.call, self.device, timeout=_LIBRARY_S, within=within)
        if answer == {"opened": True}:
            own = hash_of(search.op, candidate.implementation) or not search.op.has(candidate.implementation)
            timeout = self.options.timeout_s if own else max(self.options.timeout_s, _LIBRARY_S)
            answer = ask(
                worker, measure_candidate, search.call, self.device, candidate, turns,
                timeout=timeout, within=self.options.budget_s - self._spent_s,
            )  # fmt: skip
        elif "failed" in answer:
            answer = {"unchecked": f"stock torch fails here: {answer['failed']}"}
        search.unchecked = answer.get("unchecked", search.unchecked)
        if not answer or search.unchecked:
            return None
        self._done += not self.is_known(search, candidate)
        search.turns[candidate] = turns
        search.measured += 1
        if str(answer.get("failed")).startswith((HUNG, "crashed")):
            self._lost.add((search.op.name, candidate))
        return self.store(search, candidate, answer)

    def store(self, search: ProblemSearch, candidate: Candidate, answer: Mapping[str, Any]) -> Entry:
        key = search.key(candidate)
        times = times_of(answer)
        entry = Entry(
            search.op.name, dict(search.call.problem), self.environment, key[0], candidate.implementation,
            candidate.config.to_dict(), *times, answer.get("failed") or answer["numerics"], now(),
        )  # fmt: skip
        search.entries[key] = entry
        self.database.put([entry])
        if entry.numerics == OK and not candidate.is_stock and self.database is user_database():
            self_test.passed(search.op, candidate.implementation, entry.problem, candidate.config, self.device)
        return entry

    def _share(self) -> float:
        by_time = self._spent_s / self.options.budget_s
        return min(1.0, max(by_time, self._done / self._total if self._total else 1.0))

    def _say_how_far(self, done: str, waiting: Sequence[ProblemSearch]) -> None:
        picture_ms = 1e3 * sum(search.cost for search in waiting)
        counts = len(waiting), self._done, self._total
        log.info("%s after %.1f s: %d problems, %d of %d candidates, %.2f ms", done, self._spent_s, *counts, picture_ms)

    def _report(self, search: ProblemSearch, candidate: Candidate) -> None:
        best = search.fastest()
        entry = None if best is None else search.entry(best)
        so_far = ""
        if best is not None and entry is not None and entry.stock_us:
            so_far = f"best: {best.implementation} {entry.median_us:.1f} us, stock {entry.stock_us:.1f} us"
        self.progress(TunerProgress(self._share(), f"{search.op.name}: {candidate.implementation}", so_far))


class _Measure:
    """What a strategy is given: what was measured in an earlier run is not measured again at the first question."""

    def __init__(self, tuner: Tuner, search: ProblemSearch, worker: Worker, seconds: float) -> None:
        self._tuner, self._search, self._worker, self._seconds = tuner, search, worker, seconds
        self._begun = time.monotonic()
        self._known = {c for c in search.candidates if tuner.is_known(search, c)}

    def __call__(self, candidate: Candidate, turns: int) -> float | None:
        if candidate in self._known:
            self._known.discard(candidate)
            return _score(self._search.entry(candidate))
        if self.left() <= 0:
            return None
        return self.anew(candidate, turns)

    def anew(self, candidate: Candidate, turns: int) -> float | None:
        return _score(self._tuner.measured(self._search, candidate, self._worker, max(turns, LEAST_TURNS)))

    def left(self) -> float:
        if self._search.unchecked or not self._seconds:
            return 0.0
        return min(1 - (time.monotonic() - self._begun) / self._seconds, self._tuner.left_s / self._seconds)


def _is_to_compile(search: ProblemSearch, candidate: Candidate) -> bool:
    return is_compiled_apart(search.op, candidate) and not search.is_known(candidate)


def _by_cost(searches: Sequence[ProblemSearch]) -> list[ProblemSearch]:
    """Those that a picture spends most on first; what is composed of others after them."""
    return sorted(searches, key=lambda search: (search.op.composed, -search.cost))


def _score(entry: Entry | None) -> float | None:
    if entry is None or entry.numerics != OK or not entry.stock_us:
        return None
    return entry.median_us / entry.stock_us
