"""What a performance database holds, and how it looks as rows and as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from rocm_sd.tuning.environment import Environment

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        for name in ("median_us", "low_us", "high_us"):
            value = float(getattr(self, name))
            put(self, name, value if math.isfinite(value) else math.inf)
        if self.stock_us is not None:
            put(self, "stock_us", float(self.stock_us) if math.isfinite(self.stock_us) else None)
        put(self, "when", utc(self.when))

    @property
    def clearly_faster(self) -> bool:
        """Right, and its whole interval is below stock's time; anything else leaves the problem to stock."""
        return self.numerics == "ok" and self.stock_us is not None and self.high_us < self.stock_us

    def row(self) -> tuple[Any, ...]:
        key = (self.op, text(self.problem), self.environment.key(), self.kernel_hash, self.candidate, text(self.config))
        times = (_finite(t) for t in (self.median_us, self.low_us, self.high_us))
        return (*key, *times, self.stock_us, self.numerics, self.when)

    @classmethod
    def from_row(cls, row: tuple[Any, ...]) -> Entry:
        op, problem, environment, kernel_hash, candidate, config, *times, stock_us, numerics, when = row
        median, low, high = (math.inf if t is None else t for t in times)
        return cls(
            op, json.loads(problem), Environment.from_key(environment), kernel_hash, candidate, json.loads(config),
            median, low, high, stock_us, numerics, when,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        for name in ("median_us", "low_us", "high_us"):
            values[name] = _finite(values[name])
        return values


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


def entry_from_dict(values: dict[str, Any]) -> Entry:
    """Raises ValueError or KeyError for what is not the `to_dict` of one: it may come from anyone."""
    _known(values, Entry)
    times = {n: math.inf if values[n] is None else _number(values[n]) for n in ("median_us", "low_us", "high_us")}
    stock = None if values["stock_us"] is None else _number(values["stock_us"])
    problem, config = values["problem"], values["config"]
    if not isinstance(problem, dict) or not all(isinstance(v, int | str) for v in problem.values()):
        raise ValueError(f"problem {problem!r}")
    if not isinstance(config, dict) or not all(isinstance(v, int) for v in config.values()):
        raise ValueError(f"config {config!r}")
    named = {"problem": problem, "config": config, "stock_us": stock, **times}
    return Entry(**{**values, **named, "environment": Environment.from_dict(values["environment"])})


def quarantined_from_dict(values: dict[str, Any]) -> Quarantined:
    _known(values, Quarantined)
    return Quarantined(
        **{**values, "environment": Environment.from_dict(values["environment"]), "when": utc(values["when"])}
    )


def _known(values: Any, kind: type) -> None:
    names = {f.name for f in fields(kind)}
    if not isinstance(values, dict) or set(values) != names:
        raise ValueError(f"an entry has the fields {sorted(names)}")
    for name in names & {"op", "kernel_hash", "candidate", "numerics", "reason", "when"}:
        if not isinstance(values[name], str):
            raise ValueError(f"{name} {values[name]!r}")  # noqa: TRY004 -- what the file holds, not how it is called


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ValueError(f"a time of {value!r}")
    return float(value)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
