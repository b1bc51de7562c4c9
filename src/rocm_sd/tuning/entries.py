"""What a performance database holds, and how it looks as rows and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping  # noqa: TC003 -- read at run time, with the other types of the dataclasses
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from rocm_sd.plain_json import parsed, shortened
from rocm_sd.tuning.environment import Environment
from rocm_sd.typed_json import Misfit, schema, violations

__all__ = ["RULES", "Entry", "Quarantined", "now", "text", "utc"]

_NO_TIME = timedelta()


def now(ahead: timedelta = _NO_TIME) -> str:
    return (datetime.now(timezone.utc) + ahead).isoformat(timespec="microseconds")


def utc(when: str) -> str:
    """ISO in UTC with microseconds, so that texts compare as times do; a time without a zone is taken for UTC."""
    try:
        # Before Python 3.11 the letter is not understood.
        found = datetime.fromisoformat(when[:-1] + "+00:00" if when.endswith("Z") else when)
        aware = found.replace(tzinfo=timezone.utc) if found.tzinfo is None else found
        return aware.astimezone(timezone.utc).isoformat(timespec="microseconds")
    except (ValueError, OverflowError):
        # The first and the last day of the calendar have no neighbour in another zone.
        raise ValueError(f"{shortened(repr(when))} is no time") from None


def text(values: Mapping[str, Any]) -> str:
    """One text for equal mappings, whatever the order of their keys."""
    return json.dumps(dict(values), sort_keys=True, separators=(",", ":"))


_TIMES = ("median_us", "low_us", "high_us")
# An infinite time is null in JSON.
_TIME = {"type": ["number", "null"], "minimum": 0}
RULES = {f"Entry.{name}": _TIME for name in (*_TIMES, "stock_us")}


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

    def key(self) -> tuple[str, ...]:
        """Of two measurements with one key the newer counts."""
        where = self.environment.key()
        return self.op, text(self.problem), where, self.kernel_hash, self.candidate, text(self.config)

    def row(self) -> tuple[Any, ...]:
        times = (_finite(getattr(self, name)) for name in _TIMES)
        return (*self.key(), *times, self.stock_us, self.numerics, self.when)

    @classmethod
    def from_row(cls, row: tuple[Any, ...]) -> Entry:
        """Raises ValueError or TypeError for what `row` never gave: SQLite keeps anything in any column."""
        op, problem, environment, kernel_hash, candidate, config, *rest = row
        given = (op, parsed(problem), kernel_hash, candidate, parsed(config), *rest)
        wrong = violations(dict(zip(_ROW, given, strict=True)), _ROW_FORM, top="a row")
        if wrong:
            raise Misfit(wrong)
        where = Environment.from_key(environment)
        return cls(op, given[1], where, kernel_hash, candidate, given[4], *rest)

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

    def __post_init__(self) -> None:
        object.__setattr__(self, "when", utc(self.when))

    def row(self) -> tuple[str, ...]:
        return self.op, self.candidate, self.environment.key(), self.kernel_hash, self.reason, self.when

    @classmethod
    def from_row(cls, row: tuple[str, ...]) -> Quarantined:
        if not all(isinstance(each, str) for each in row):
            raise TypeError("a row has something else than text")
        return cls(row[0], row[1], Environment.from_key(row[2]), *row[3:])


# The environment aside: its key is read once for many rows.
_ENTRY = schema(Entry, RULES)
_ROW = tuple(name for name in _ENTRY["properties"] if name != "environment")
_ROW_FORM = {**_ENTRY, "required": _ROW, "properties": {name: _ENTRY["properties"][name] for name in _ROW}}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
