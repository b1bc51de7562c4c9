"""The search itself: problems by their share of a picture, candidates by a strategy, everything stored as it comes.

Nothing depends on how a search ends. A candidate is stored when it was measured; stock is stored when the search of a
problem is complete, so a problem is complete where stock's is the newest of its measurements.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

import torch

from rocm_sd import arch
from rocm_sd.measuring import LEAST_TURNS, interval
from rocm_sd.tuning import environment, lookup
from rocm_sd.tuning.choice import STOCK
from rocm_sd.tuning.entries import Entry, now, text
from rocm_sd.tuning.resolve import preferred
from rocm_sd.tuning.search import ahead
from rocm_sd.tuning.search.calls import make
from rocm_sd.tuning.search.candidates import Candidate, candidates, hash_of, operations
from rocm_sd.tuning.search.halving import Halving, Strategy
from rocm_sd.tuning.search.pipeline_settings import CONVOLUTION_LIBRARY
from rocm_sd.tuning.search.workbench import OK, ask, measure_candidate
from rocm_sd.workers import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from rocm_sd.ops.registry import Op
    from rocm_sd.tuning.database import Database
    from rocm_sd.tuning.search.calls import OpCall, Traced

__all__ = ["Failure", "Tuner", "TunerOptions", "TunerProgress", "TuningResult"]

Key = tuple[str, str, frozenset[tuple[str, int]]]  # hash, implementation, config
_LAST = 0.1  # of the budget: no candidate begins in it, the one under way may take it
_SEARCHED = 0.5  # of the budget: what is left to the search, however long it took to get there
_CONFIRMED = 24  # turns: enough that the best is not the luckiest
_MOST_CONFIRMED = 6


@dataclass(frozen=True)
class TunerOptions:
    """Seconds: `budget_s` for all, `timeout_s` for one candidate, its compilation included."""

    budget_s: float
    timeout_s: float = 60.0
    jobs: int = 1
    strategy: Strategy = field(default_factory=Halving)
    fresh: bool = False


@dataclass(frozen=True)
class TunerProgress:
    """`share` of the whole, by time or by candidates, whichever is further; `best` of the problem under way."""

    share: float
    what: str
    best: str = ""


@dataclass(frozen=True)
class Failure:
    """A candidate by name, and what was wrong with it: a wrong result, an error, a crash or a hang."""

    candidate: str
    reason: str


@dataclass(frozen=True)
class TuningResult:
    """`measured` of `candidates` are known, `now` of them since this run; `unchecked`: why none could be checked."""

    op: str
    problem: Mapping[str, int | str]
    count: int
    chosen: Candidate
    us: float | None
    stock_us: float | None
    candidates: int
    measured: int
    now: int
    complete: bool
    failures: tuple[Failure, ...]
    unchecked: str = ""

    @property
    def times_stock(self) -> float | None:
        return None if not self.us or not self.stock_us else self.stock_us / self.us

    def to_dict(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "problem": dict(self.problem),
            "count": self.count,
            "chosen": {"implementation": self.chosen.implementation, "config": self.chosen.config.to_dict()},
            "us": self.us,
            "stock_us": self.stock_us,
            "times_stock": self.times_stock,
            "candidates": self.candidates,
            "measured": self.measured,
            "measured_now": self.now,
            "complete": self.complete,
            "failures": [{"candidate": f.candidate, "reason": f.reason} for f in self.failures],
            "unchecked": self.unchecked or None,
        }


@dataclass
class _ProblemSearch:
    """One problem: its candidates, and what is known of each."""

    op: Op
    traced: Traced
    candidates: list[Candidate]
    entries: dict[Key, Entry]
    weight: float
    arch_name: str
    turns: dict[Candidate, int] = field(default_factory=dict)
    measured: int = 0
    unchecked: str = ""

    @property
    def call(self) -> OpCall:
        return self.traced.call

    def key(self, candidate: Candidate) -> Key:
        config = frozenset(candidate.config.to_dict().items())
        return (hash_of(self.op, candidate.implementation), candidate.implementation, config)

    def entry(self, candidate: Candidate) -> Entry | None:
        return self.entries.get(self.key(candidate))

    @property
    def shipped(self) -> Candidate | None:
        """What would run without a search, where that is not stock: `candidates` puts it first."""
        named = lookup(self.op.name, self.arch_name, dict(self.call.problem)).implementation
        first = next(iter(self.others), None)
        return first if first is not None and first.implementation == named else None

    @property
    def others(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates if not candidate.is_stock]

    @property
    def is_complete(self) -> bool:
        stock = self.entry(Candidate(STOCK))
        found = [self.entry(candidate) for candidate in self.others]
        return stock is not None and all(each is not None and each.when <= stock.when for each in found)

    def fastest(self) -> Candidate | None:
        """The candidate with the least median, stock apart: the database looks for it in the same way."""
        times = {
            candidate: entry.median_us
            for candidate in self.others
            if (entry := self.entry(candidate)) is not None and entry.numerics == OK
        }
        return min(times, key=times.__getitem__) if times else None


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
        self.environment = environment.current(device)
        self.interrupted = False
        self._begun = time.monotonic()
        self._done = self._total = 0

    def run(self, traced: Sequence[Traced], begun: float | None = None) -> list[TuningResult]:
        """`begun`, by the monotonic clock: since when the budget is being spent; now, unless given."""
        self._begun = time.monotonic()
        if begun is not None:
            self._begun = max(begun, self._begun - (1 - _SEARCHED) * self.options.budget_s)
        searches = self._searches(traced)
        waiting = [search for search in searches if self.options.fresh or not search.is_complete]
        self._total = sum(len(search.candidates) for search in waiting)
        try:
            if self.options.jobs > 1:
                self._compile_ahead(waiting)
            with Worker() as worker:
                for number, search in enumerate(waiting):
                    if self.left_s <= 0:
                        break
                    self._search(search, worker, self._allotted(waiting[number:]))
        except KeyboardInterrupt:
            self.interrupted = True
        return [self._outcome(search) for search in searches]

    @property
    def left_s(self) -> float:
        """The seconds until no further candidate is started."""
        return (1 - _LAST) * self.options.budget_s - self._spent_s

    @property
    def _spent_s(self) -> float:
        return time.monotonic() - self._begun

    def _searches(self, traced: Sequence[Traced]) -> list[_ProblemSearch]:
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
            known = by_problem.get((op.name, text(problem)), {})
            found.append(
                _ProblemSearch(op, each, candidates(op, problem, self.device), known, weight(op, each), arch_name)
            )
        return sorted(found, key=lambda search: (search.op.composed, -search.weight))

    def _allotted(self, waiting: Sequence[_ProblemSearch]) -> float:
        """Seconds for the first of those that wait: its share of what they cost, and at least half an equal one."""
        costs = [search.weight * len(search.candidates) for search in waiting]
        share = costs[0] / sum(costs) if sum(costs) else 1.0
        return self.left_s * max(share, 0.5 / len(waiting))

    def _search(self, search: _ProblemSearch, worker: Worker, seconds: float) -> None:
        measure = _Measure(self, search, worker, seconds)
        done_before = self._done
        stock = Candidate(STOCK)
        others = search.others
        if others:
            self.options.strategy.search(others, measure)
            self._confirm(search, measure)
            self._compare_with_shipped(search, measure)
        complete = all(search.entry(candidate) is not None for candidate in others)
        if complete and not search.unchecked and self._spent_s < self.options.budget_s:
            # Whatever was measured before: it must be the newest now.
            measure.anew(stock, _CONFIRMED)
        self._done = done_before + len(search.candidates)

    def _confirm(self, search: _ProblemSearch, measure: _Measure) -> None:
        """Time the best again until it is one that was timed often: the least of many few turns is mostly luck."""
        for _ in range(_MOST_CONFIRMED):
            best = search.fastest()
            if best is None or search.turns.get(best, 0) >= _CONFIRMED or self.left_s <= 0:
                return
            measure.anew(best, _CONFIRMED)

    def _compare_with_shipped(self, search: _ProblemSearch, measure: _Measure) -> None:
        """What the data name stays unless another is faster beyond doubt: its time has to be as sure as the best's."""
        shipped = search.shipped
        if shipped is None or search.turns.get(shipped, 0) >= _CONFIRMED or self.left_s <= 0:
            return
        if search.fastest() != shipped:
            measure.anew(shipped, _CONFIRMED)

    def measured(self, search: _ProblemSearch, candidate: Candidate, worker: Worker, turns: int) -> Entry | None:
        """One candidate, stored at once; None where its time was cut by the end of the budget."""
        within = self.options.budget_s - self._spent_s
        if within <= 0:
            return None
        self._report(search, candidate)
        answer = ask(
            worker, measure_candidate, search.call, self.device, candidate, turns,
            timeout=self.options.timeout_s, within=within,
        )  # fmt: skip
        search.unchecked = answer.get("unchecked", search.unchecked)
        if not answer or search.unchecked:
            return None
        search.turns[candidate] = turns
        search.measured += 1
        return self.store(search, candidate, answer)

    def store(self, search: _ProblemSearch, candidate: Candidate, answer: Mapping[str, Any]) -> Entry:
        key = search.key(candidate)
        times = _times(answer)
        entry = Entry(
            search.op.name, dict(search.call.problem), self.environment, key[0], candidate.implementation,
            candidate.config.to_dict(), *times, answer.get("failed") or answer["numerics"], now(),
        )  # fmt: skip
        search.entries[key] = entry
        self.database.put([entry])
        return entry

    def _compile_ahead(self, waiting: Sequence[_ProblemSearch]) -> None:
        wanted = [
            (search.call, [c for c in search.others if c.config and search.entry(c) is None]) for search in waiting
        ]
        by_call = {search.call: search for search in waiting}

        def failed(call: OpCall, candidate: Candidate, reason: str) -> None:
            self.store(by_call[call], candidate, {"failed": reason})

        compiled = ahead.compile_all(
            wanted, self.device, jobs=self.options.jobs, seconds=ahead.SHARE * self.left_s,
            timeout_s=self.options.timeout_s, on_failed=failed,
            on_progress=lambda what: self.progress(TunerProgress(self._share(), what)),
        )  # fmt: skip
        for search in waiting:
            # Those that are compiled can be timed at once.
            slow = {c for c in search.others[1:] if c.config and (search.call, c) not in compiled}
            search.candidates.sort(key=lambda candidate, slow=slow: candidate in slow)  # type: ignore[misc]

    def _share(self) -> float:
        by_time = self._spent_s / self.options.budget_s
        return min(1.0, max(by_time, self._done / self._total if self._total else 1.0))

    def _report(self, search: _ProblemSearch, candidate: Candidate) -> None:
        best = search.fastest()
        entry = None if best is None else search.entry(best)
        so_far = ""
        if best is not None and entry is not None and entry.stock_us:
            so_far = f"best: {best.implementation} {entry.median_us:.1f} us, stock {entry.stock_us:.1f} us"
        self.progress(TunerProgress(self._share(), f"{search.op.name}: {candidate.implementation}", so_far))

    def _outcome(self, search: _ProblemSearch) -> TuningResult:
        entries = {c: e for c in search.candidates if (e := search.entry(c)) is not None}
        failures = tuple(Failure(str(c), e.numerics) for c, e in entries.items() if e.numerics != OK)
        usable = {c: e for c, e in entries.items() if e.clearly_faster and not c.is_stock}
        chosen = min(usable, key=lambda c: usable[c].median_us) if usable else Candidate(STOCK)
        shipped = search.shipped
        if usable and shipped in usable and preferred(usable[chosen], usable[shipped]) is usable[shipped]:
            chosen = shipped
        stock = entries.get(Candidate(STOCK))
        stock_us = next((e.stock_us for e in (entries.get(chosen), stock, *entries.values()) if e and e.stock_us), None)
        return TuningResult(
            search.op.name, dict(search.call.problem), search.traced.count, chosen,
            entries[chosen].median_us if chosen in usable else stock_us, stock_us, len(search.candidates), len(entries),
            search.measured, search.is_complete, failures, search.unchecked,
        )  # fmt: skip


class _Measure:
    """What a strategy is given: what was measured in an earlier run is not measured again at the first question."""

    def __init__(self, tuner: Tuner, search: _ProblemSearch, worker: Worker, seconds: float) -> None:
        self._tuner, self._search, self._worker, self._seconds = tuner, search, worker, seconds
        self._begun = time.monotonic()
        self._known = set() if tuner.options.fresh else {c for c in search.candidates if search.entry(c) is not None}

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


def _score(entry: Entry | None) -> float | None:
    if entry is None or entry.numerics != OK or not entry.stock_us:
        return None
    return entry.median_us / entry.stock_us


def _times(answer: Mapping[str, Any]) -> tuple[float, float, float, float | None]:
    """Median, its interval, and stock's median, in microseconds.

    The interval is that of the ratio to stock, turn by turn, at stock's median: what slows both is not in it, so it is
    below stock's time exactly where the candidate is faster beyond doubt.
    """
    if answer.get("numerics") != OK:
        return math.inf, math.inf, math.inf, None
    ours, stock = ([1e3 * ms for ms in answer[who]] for who in ("ours", "stock"))
    if ours == stock:
        return median(ours), min(ours), max(ours), median(ours)
    least, most = interval(ours, stock)
    middle = median(stock)
    return median(ours), middle / most, middle / least, middle


def weight(op: Op, traced: Traced) -> float:
    """Roughly the seconds that a step spends on it; for the order of problems, and for their share of the budget."""
    if op.name == CONVOLUTION_LIBRARY.name:
        # Last: MIOpen's search for algorithms can take minutes.
        return 0.0
    if op.tuning is None:
        return 1.0
    work = op.tuning.work(*make(traced.call, torch.device("meta")))
    return traced.count * (work.flops / 50e12 + work.bytes / 500e9 + 3e-6)
