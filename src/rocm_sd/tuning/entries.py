"""What a performance database holds, and how it looks as rows and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping  # noqa: TC003 -- read at run time, with the other types of the dataclasses
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from typing import Any

from rocm_sd.tuning.environment import Environment
from rocm_sd.typed_json import read

__all__ = ["Entry", "Quarantined", "entry_from_dict", "now", "quarantined_from_dict", "text", "utc"]


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")


def utc(when: str) -> str:
    """ISO in UTC with microseconds, so that texts compare as times do; a time without a zone is taken for UTC."""
    # Before Python 3.11 the letter is not understood.
    parsed = datetime.fromisoformat(when[:-1] + "+00:00" if when.endswith("Z") else when)
    aware = parsed.replace(tzinfo=timezone.utc) if parsed.tzinfo is None else parsed
    return aware.astimezone(timezone.utc).isoformat(timespec="microseconds")


def text(values: Mapping[str, Any]) -> str:
    """One text for equal mappings, whatever the order of their keys."""
    return json.dumps(dict(values), sort_keys=True, separators=(",", ":"))


_TIMES = ("median_us", "low_us", "high_us")
# An infinite time is null in JSON.
_TIME = {"type": ["number", "null"], "minimum": 0}
_RULES = {f"Entry.{name}": _TIME for name in (*_TIMES, "stock_us")}


@dataclass(frozen=True)
class Entry:
    """One config of one candidate at one problem; `numerics` is "ok", or the reason that its result is wrong.

    Times are microseconds, infinite where nothing could be timed; `low_us` and `high_us` are the interval of the
    median. `stock_us` is stock's median beside it.
    """

    op: str
    problem: Mapping[str, int | str]
    environment: Environment
    kernel_hash: str
    candidate: str
    config: Mapping[str, int]
    median_us: float
    low_us: float
    high_us: float
    stock_us: float | None
    numerics: str
    when: str

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "problem", dict(self.problem))
        put(self, "config", dict(self.config))
        for name in _TIMES:
            value = getattr(self, name)
            put(self, name, float(value) if value is not None and math.isfinite(value) else math.inf)
        if self.stock_us is not None:
            put(self, "stock_us", float(self.stock_us) if math.isfinite(self.stock_us) else None)
        put(self, "when", utc(self.when))

    @property
    def clearly_faster(self) -> bool:
        """Right, and its whole interval is below stock's time; anything else leaves the problem to stock."""
        return self.numerics == "ok" and self.stock_us is not None and self.high_us < self.stock_us

    def row(self) -> tuple[Any, ...]:
        key = (self.op, text(self.problem), self.environment.key(), self.kernel_hash, self.candidate, text(self.config))
        times = (_finite(getattr(self, name)) for name in _TIMES)
        return (*key, *times, self.stock_us, self.numerics, self.when)

    @classmethod
    def from_row(cls, row: tuple[Any, ...]) -> Entry:
        op, problem, environment, kernel_hash, candidate, config, *rest = row
        where = Environment.from_key(environment)
        return cls(op, json.loads(problem), where, kernel_hash, candidate, json.loads(config), *rest)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), **{name: _finite(getattr(self, name)) for name in _TIMES}}


@dataclass(frozen=True)
class Quarantined:
    """A candidate that is never chosen there; one without a kernel of this project has an empty hash."""

    op: str
    candidate: str
    environment: Environment
    kernel_hash: str
    reason: str
    when: str

    def row(self) -> tuple[str, ...]:
        return self.op, self.candidate, self.environment.key(), self.kernel_hash, self.reason, self.when

    @classmethod
    def from_row(cls, row: tuple[str, ...]) -> Quarantined:
        return cls(row[0], row[1], Environment.from_key(row[2]), *row[3:])


def entry_from_dict(values: Any) -> Entry:
    """Raises ValueError for what is not the `to_dict` of one: it may come from anyone."""
    return read(Entry, values, _RULES, top="an entry")


def quarantined_from_dict(values: Any) -> Quarantined:
    found = read(Quarantined, values, top="an entry")
    return replace(found, when=utc(found.when))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
