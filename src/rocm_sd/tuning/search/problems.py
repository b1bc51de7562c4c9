"""The problems of a search, each with its candidates and what is known of them; and what one says of its neighbours.

A neighbour is a problem of the same op that differs in sizes alone: another layer's, or that of pictures of another
size which were drawn before. What was fast there is tried first here, and where time is short it is all that is tried:
each is timed at this very problem before it is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from rocm_sd.tuning import lookup
from rocm_sd.tuning.choice import STOCK
from rocm_sd.tuning.resolve import preferred
from rocm_sd.tuning.search.calls import make
from rocm_sd.tuning.search.candidates import Candidate, hash_of
from rocm_sd.tuning.search.pipeline_settings import CONVOLUTION_LIBRARY
from rocm_sd.tuning.search.workbench import HUNG, OK

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from rocm_sd.ops.registry import Op
    from rocm_sd.tuning import Problem
    from rocm_sd.tuning.entries import Entry
    from rocm_sd.tuning.search.calls import OpCall, Traced

__all__ = ["Failure", "Key", "Neighbour", "ProblemSearch", "TuningResult", "distance", "fast_nearby", "weight"]

Key = tuple[str, str, frozenset[tuple[str, int]]]  # hash, implementation, config
_NEIGHBOURS = 3  # the nearest: their fastest candidates are tried first
_OF_EACH = 2


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
class ProblemSearch:
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

    @property
    def is_settled(self) -> bool:
        """Complete, with nothing to try again."""
        return self.is_complete and all(self.is_known(candidate) for candidate in self.others)

    def is_known(self, candidate: Candidate) -> bool:
        """Whether it was measured. One that hung may have waited for a library's own search: it is tried again."""
        entry = self.entry(candidate)
        return entry is not None and not entry.numerics.startswith(HUNG)

    @property
    def as_neighbour(self) -> Neighbour:
        return Neighbour(self.op.name, dict(self.call.problem), self.entries)

    @property
    def cost(self) -> float:
        """What a picture spends on it with the best that is known: measured, or else its weight."""
        best = self.fastest()
        entry = None if best is None else self.entry(best)
        if entry is None or not entry.stock_us:
            return self.weight
        return self.traced.count * min(entry.median_us, entry.stock_us) / 1e6

    def fastest(self) -> Candidate | None:
        """Of those that are right, stock apart, by the median: the database looks for the least in the same way."""
        times = {
            candidate: entry.median_us
            for candidate in self.others
            if (entry := self.entry(candidate)) is not None and entry.numerics == OK
        }
        return min(times, key=times.__getitem__, default=None)

    def outcome(self) -> TuningResult:
        entries = {c: e for c in self.candidates if (e := self.entry(c)) is not None}
        failures = tuple(Failure(str(c), e.numerics) for c, e in entries.items() if e.numerics != OK)
        usable = {c: e for c, e in entries.items() if e.clearly_faster and not c.is_stock}
        chosen = min(usable, key=lambda c: usable[c].median_us) if usable else Candidate(STOCK)
        shipped = self.shipped
        if usable and shipped in usable and preferred(usable[chosen], usable[shipped]) is usable[shipped]:
            chosen = shipped
        stock = entries.get(Candidate(STOCK))
        stock_us = next((e.stock_us for e in (entries.get(chosen), stock, *entries.values()) if e and e.stock_us), None)
        return TuningResult(
            self.op.name, dict(self.call.problem), self.traced.count, chosen,
            entries[chosen].median_us if chosen in usable else stock_us, stock_us, len(self.candidates), len(entries),
            self.measured, self.is_complete, failures, self.unchecked,
        )  # fmt: skip


def distance(one: Problem, other: Problem) -> float | None:
    """How far two problems of an op are apart: doublings of all sizes together; None where more than sizes differ."""
    if one.keys() != other.keys():
        return None
    total = 0.0
    for name, value in one.items():
        there = other[name]
        if isinstance(value, str) or isinstance(there, str) or min(value, there) <= 0:
            if value != there:
                return None
        else:
            total += abs(math.log2(value / there))
    return total


@dataclass(frozen=True)
class Neighbour:
    """A problem of an op that was measured here, in this search or long before it, and what is known of it."""

    op: str
    problem: Problem
    entries: Mapping[Key, Entry]

    def ranked(self) -> list[Key]:
        """All that are right, stock apart, by their median."""
        right = {k: e for k, e in self.entries.items() if e.numerics == OK and e.candidate != STOCK}
        return sorted(right, key=lambda key: right[key].median_us)


def fast_nearby(search: ProblemSearch, known: Iterable[Neighbour]) -> list[Candidate]:
    """The fastest candidates of the nearest problems that were measured, best first; empty where there are none."""
    here = dict(search.call.problem)
    near: list[tuple[float, list[Key]]] = []
    for other in known:
        apart = distance(here, other.problem) if other.op == search.op.name else None
        # At no distance it is the problem itself.
        if apart and (ranked := other.ranked()):
            near.append((apart, ranked[:_OF_EACH]))
    near.sort(key=lambda one: one[0])
    can = {search.key(candidate): candidate for candidate in search.candidates}
    # The best of each first, then the second best of each.
    found = [ranked[place] for place in range(_OF_EACH) for _, ranked in near[:_NEIGHBOURS] if place < len(ranked)]
    return list(dict.fromkeys(can[key] for key in found if key in can))


def weight(op: Op, traced: Traced) -> float:
    """Roughly the seconds that a step spends on it; for the order of problems, and for their share of the budget."""
    if op.name == CONVOLUTION_LIBRARY.name:
        # Last: MIOpen's search for algorithms can take minutes.
        return 0.0
    if op.tuning is None:
        return 1.0
    work = op.tuning.work(*make(traced.call, torch.device("meta")))
    return traced.count * (work.flops / 50e12 + work.bytes / 500e9 + 3e-6)
