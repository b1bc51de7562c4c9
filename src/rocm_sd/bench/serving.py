"""What a load test of a server leaves behind: one JSON file with every request, and the figures that follow from it.

Only what was seen is stored. Counts, rates and percentiles are computed from the requests wherever they are shown, so a
record cannot contradict itself. `ServingRecord.load` refuses what is not such a record.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rocm_sd.bench.records import RULES as RECORD_RULES
from rocm_sd.bench.records import Machine, UnreadableRecord, read_record
from rocm_sd.bench.records import keep_older as keep_older_of
from rocm_sd.comparison import TURNS_FOR_95
from rocm_sd.files import write_text
from rocm_sd.plain_json import read_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from rocm_sd.typed_json import Rules

__all__ = [
    "ANSWERED", "FAILED", "FORMAT", "LOST", "OPEN", "OUTCOMES", "REJECTED", "MemoryAt", "Request", "Seen",
    "ServerFacts", "ServingRecord", "Setting", "keep_older", "percentile", "record_file",
]  # fmt: skip

FORMAT = "rocm-sd-bench-serve/1"
OUTCOMES = ANSWERED, REJECTED, FAILED, LOST, OPEN = "answered", "rejected", "failed", "lost", "open"
_OK, _BUSY = 200, 429

# Requests that wait in one queue are late together. Drawn one by one they would claim more than they know: so whole
# stretches of the run are drawn, this many of them.
_STRETCHES = 20
_DRAWS, _SEED = 2000, 20260101
_OUTSIDE = 0.025
# No picture takes less: a clock that stood still gives no rate.
_LEAST_S = 1e-6

_MOST = 1e12
_TIME, _POSITIVE = {"minimum": 0, "maximum": _MOST}, {"exclusiveMinimum": 0, "minimum": 1e-9, "maximum": _MOST}
_COUNT, _BYTES = {"minimum": 1, "maximum": 10**9}, {"minimum": 0, "maximum": 1e18}
# What the types of the dataclasses below do not say of their values.
RULES: Rules = {
    **{name: rule for name, rule in RECORD_RULES.items() if name.startswith("Machine.")},
    "ServingRecord.when": RECORD_RULES["Record.when"],
    "ServingRecord.sent_for_s": _POSITIVE,
    "Request.outcome": {"enum": list(OUTCOMES)},
    "Request.status": {"minimum": 100, "maximum": 599},
    **{f"Request.{name}": _TIME for name in ("start_s", "seconds", "late_s", "retry_after_s")},
    **{f"Setting.{name}": _POSITIVE for name in ("rate", "seconds")},
    **{f"Setting.{name}": _COUNT for name in ("steps", "width", "height", "prompts")},
    "Setting.seed": {"minimum": 0},
    "ServerFacts.capacity": _POSITIVE,
    "ServerFacts.drawn_at_once": _TIME,
    **{f"Seen.{name}": _BYTES for name in ("batch_pictures", "batches", "host_bytes", "device_bytes")},
    "MemoryAt.at_s": _TIME,
    **{f"MemoryAt.{name}": _BYTES for name in ("host_bytes", "device_bytes")},
}


@dataclass(frozen=True)
class Request:
    """`start_s`: when it was due, from the beginning of the run; `late_s`: how much later it was really sent.
    `seconds`: from when it was due to the end of its answer, or until none could come; None where it is open.

    `outcome`: "answered", by a picture of the right size; "rejected", by 429; "failed", by another status or a refused
    connection; "lost", taken and not answered, or by something that is no such picture; "open", when the run was
    interrupted. `why` has words for the last three.
    """

    start_s: float
    outcome: str
    seconds: float | None = None
    status: int | None = None
    late_s: float = 0.0
    retry_after_s: float | None = None
    why: str | None = None


@dataclass(frozen=True)
class Setting:
    """What was sent: `rate` in requests a second, as it was `asked` for ("2" or "0.8x"), for so many `seconds`."""

    rate: float
    asked: str
    seconds: float
    steps: int
    width: int
    height: int
    model: str
    prompts: int
    seed: int = 0


@dataclass(frozen=True)
class ServerFacts:
    """`own`: started for this run, on the record's machine; else that machine is only where the requests came from.

    `capacity`: pictures a second while as many were asked for at once as it takes, and the most that it then drew at
    once; None where it was not measured.
    """

    version: str
    own: bool
    capacity: float | None = None
    drawn_at_once: int | None = None


@dataclass(frozen=True)
class Seen:
    """What the server said of itself by /metrics: pictures of all its steps, those steps, and its memory."""

    batch_pictures: float | None = None
    batches: float | None = None
    host_bytes: float | None = None
    device_bytes: float | None = None


@dataclass(frozen=True)
class MemoryAt:
    """What the server's processes held together, by /metrics, so long after the beginning of the run."""

    at_s: float
    host_bytes: float
    device_bytes: float = 0.0


@dataclass(frozen=True)
class ServingRecord:
    """`sent_for_s`: so long requests were sent: the setting's seconds, or less where the run was cut short, which
    `complete` and a note say. `memory`: in the order of time.
    """

    machine: Machine
    command: str
    when: str
    setting: Setting
    server: ServerFacts
    requests: tuple[Request, ...]
    sent_for_s: float
    before: Seen = Seen()
    after: Seen = Seen()
    complete: bool = True
    notes: tuple[str, ...] = ()
    memory: tuple[MemoryAt, ...] = ()

    def count(self, outcome: str) -> int:
        return sum(request.outcome == outcome for request in self.requests)

    def of(self, outcome: str) -> list[Request]:
        """In the order in which they were due."""
        found = (request for request in self.requests if request.outcome == outcome)
        return sorted(found, key=lambda request: request.start_s)

    @property
    def latencies(self) -> list[float]:
        """Of those that were answered, in the order in which they were due."""
        return [request.seconds for request in self.of(ANSWERED) if request.seconds is not None]

    def latency_interval(self, share: float) -> tuple[float, float] | None:
        """Of a percentile, 95%; None of fewer than eight answers."""
        found = self.latencies
        if len(found) < TURNS_FOR_95:
            return None
        stretches = np.array_split(np.asarray(found, dtype=np.float64), min(_STRETCHES, len(found)))
        drawn = [
            percentile(np.concatenate([stretches[place] for place in places]), share)
            for places in _chosen(len(stretches))
        ]
        return _bounds(drawn)

    @property
    def achieved_rate(self) -> float:
        return len(self.requests) / self.sent_for_s

    @property
    def span_s(self) -> float:
        """From the first request's time to the last answer."""
        return max((request.start_s + (request.seconds or 0.0) for request in self.of(ANSWERED)), default=0.0)

    @property
    def throughput(self) -> float | None:
        """Pictures a second."""
        return self.count(ANSWERED) / self.span_s if self.span_s > _LEAST_S else None

    @property
    def throughput_interval(self) -> tuple[float, float] | None:
        """95%, over stretches of equal time; None of fewer than eight answers."""
        ends = [request.start_s + (request.seconds or 0.0) for request in self.of(ANSWERED)]
        if len(ends) < TURNS_FOR_95 or self.span_s <= _LEAST_S:
            return None
        counts, _ = np.histogram(ends, bins=min(_STRETCHES, len(ends)), range=(0.0, self.span_s))
        return _bounds(counts[_chosen(len(counts))].sum(axis=1) / self.span_s)

    @property
    def pictures_a_step(self) -> float | None:
        """How many pictures shared a step of the model, on average over the run."""
        before, after = self.before, self.after
        if before.batch_pictures is None or before.batches is None:
            return None
        if after.batch_pictures is None or after.batches is None or after.batches <= before.batches:
            return None
        return max(0.0, after.batch_pictures - before.batch_pictures) / (after.batches - before.batches)

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    def save(self, path: Path) -> None:
        write_text(path, json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> ServingRecord:
        # NaN comes through to where its place in the record is named.
        return cls.from_dict(read_json(path, partial(UnreadableRecord, path), finite=False), path)

    @classmethod
    def from_dict(cls, values: Any, path: Path) -> ServingRecord:
        """What `to_dict` gave; `path` is the file that it was read from."""
        found = read_record(cls, values, path, FORMAT, RULES)
        for number, request in enumerate(found.requests):
            wrong = _contradiction(request)
            if wrong:
                raise UnreadableRecord(path, f"requests[{number}] {wrong}")
        return found


def _contradiction(request: Request) -> str | None:
    if (request.seconds is None) != (request.outcome == OPEN):
        return "is open and has an end" if request.outcome == OPEN else f"was {request.outcome} and has no end"
    wanted = {ANSWERED: _OK, REJECTED: _BUSY}.get(request.outcome, request.status)
    return None if request.status == wanted else f"was {request.outcome} with status {request.status}"


def percentile(values: Sequence[float] | NDArray[np.float64], share: float) -> float:
    """The least of the values that so great a share of them does not exceed: one that was really seen."""
    return float(np.quantile(np.asarray(values, dtype=np.float64), share, method="inverted_cdf"))


def _chosen(count: int) -> NDArray[np.int64]:
    """Which of so many, drawn with replacement. The seed is fixed: the same record gives the same interval."""
    return np.random.default_rng(_SEED).integers(count, size=(_DRAWS, count))


def _bounds(drawn: Sequence[float] | NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.quantile(np.asarray(drawn, dtype=np.float64), [_OUTSIDE, 1 - _OUTSIDE])
    return float(low), float(high)


def record_file(out: Path) -> Path:
    return out / "serve.json"


def keep_older(file: Path) -> None:
    keep_older_of(file, ServingRecord.load)
