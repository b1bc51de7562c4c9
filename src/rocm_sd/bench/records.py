"""What a benchmark leaves behind: one JSON file with the machine, the versions, every single timing and what follows.

Only what was measured is stored. Averages, percentiles and rates are computed from the timings wherever they are shown,
so a record cannot contradict itself. `Record.load` refuses what is not a record, or is one of a later version.
`continued` goes on with the record of an interrupted run; a finished one is never overwritten. One run at a time writes
a file: the other is told so before it measures anything.
"""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, TypeVar

from rocm_sd.bench.verdict import EQUAL_DB, EXACT, Quality
from rocm_sd.comparison import Comparison
from rocm_sd.errors import RocmSdError
from rocm_sd.files import alone, write_text
from rocm_sd.plain_json import read_json
from rocm_sd.typed_json import Misfit, Rules, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = [
    "COMPILE", "FORMAT", "INTERVALS", "NOT_LOADED", "OURS", "RULES", "STOCK", "Comparison", "LoadTimes", "Machine",
    "Measurement", "Record", "RecordInUse", "UnreadableRecord", "WorkloadFacts", "continued", "keep_older", "now",
    "read_record", "record_file",
]  # fmt: skip

Kind = TypeVar("Kind")

log = logging.getLogger("rocm_sd")
FORMAT = "rocm-sd-bench/1"
# The engines that every other is compared with.
STOCK, OURS = "stock", "rocm-sd"
# In an ablation it is no row, but what the last one is held against.
COMPILE = "compile"
INTERVALS = "Intervals are of 95% from eight turns on; of fewer they are the extremes that the turns allow."

# Far beyond every card and picture, and far from where sums, ratios and their logarithms leave the floats.
_LEAST, _MOST = 1e-9, 1e12
_COUNT, _NOT_NEGATIVE = {"minimum": 1, "maximum": 10**9}, {"minimum": 0, "maximum": _MOST}
_POSITIVE = {"exclusiveMinimum": 0, "minimum": _LEAST, "maximum": _MOST}
# It names a file when a newer record takes its place.
_TIME = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,6})?)?(Z|[+-][0-9]{2}:[0-9]{2})?)?$"
_NEVER_NEGATIVE = (
    "first_picture_s", "warm_up_s", "first_run_mib", "second_run_mib", "power_watt", "clock_mhz", "floor_ms", "card_ms",
    "error", "stock_error",
)  # fmt: skip
# What the types of the dataclasses below do not say of their values.
RULES: Rules = {
    "Record.kind": {"enum": ["engines", "ablation", "op", "pareto"]},
    "Record.when": {"pattern": _TIME},
    **{f"Machine.{name}": _NOT_NEGATIVE for name in ("compute_units", "memory_mib")},
    **{f"WorkloadFacts.{name}": _NOT_NEGATIVE for name in ("height", "width", "steps")},
    "WorkloadFacts.guidance": {"minimum": -_MOST, "maximum": _MOST},
    "WorkloadFacts.flops": {"minimum": 0, "maximum": 1e30},
    "Measurement.batch": _COUNT,
    "Measurement.steps": _COUNT,
    "Measurement.ms": {"items": {"type": "number", **_POSITIVE}},
    **{f"Measurement.{name}": _NOT_NEGATIVE for name in _NEVER_NEGATIVE},
    **{f"LoadTimes.{name}": _NOT_NEGATIVE for name in ("cold_s", "warm_s")},
    "Measurement.temperature_c": {"minimum": -273.15, "maximum": _MOST},
    "Quality.psnr_db": {"items": {"type": "number", "minimum": 0, "maximum": EQUAL_DB}},
    "Quality.ssim": {"items": {"type": "number", "minimum": -1, "maximum": 1}},
    "Quality.match": {"items": {"type": "number", "minimum": -1, "maximum": 1}},
    **{f"Comparison.{name}": _POSITIVE for name in ("ratio", "low", "high")},
    "Comparison.batch": _COUNT,
    "Comparison.verdict": {"enum": ["faster", "slower", "no difference"]},
}


class UnreadableRecord(RocmSdError):
    """A file that is not a benchmark record of this version."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f"{path} is not a benchmark record: {why}.",
            hint="Records are written by: rocm-sd bench WORKLOAD --out FOLDER",
        )


class RecordInUse(RocmSdError):
    """Two runs would write one record, and one of them would be lost."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"Another run of rocm-sd bench is writing {path}: nothing was measured.",
            hint="Wait for it, since two runs on one machine disturb each other; or choose another folder with --out.",
        )


@dataclass(frozen=True)
class Machine:
    """The card and the versions; nothing that names a person, a host or a folder."""

    device: str
    arch: str
    compute_units: int | None
    memory_mib: int | None
    driver: str | None
    system: str
    versions: dict[str, str]


@dataclass(frozen=True)
class WorkloadFacts:
    """`weights`: "random", or where they came from; `flops`: of one whole picture, if they were counted."""

    name: str
    model: str
    weights: str
    height: int
    width: int
    steps: int
    scheduler: str
    guidance: float
    dtype: str
    flops: float | None = None


@dataclass(frozen=True)
class LoadTimes:
    """Seconds from the files of a model to a pipeline on the device: at first, and once more. None of random weights.

    `from_disk`: at first its files were seen to be out of the system's page cache.
    """

    cold_s: float | None = None
    warm_s: float | None = None
    from_disk: bool = False

    def __str__(self) -> str:
        if self.cold_s is None or self.warm_s is None:
            return "Nothing was loaded"
        first = "from the disk" if self.from_disk else "at first"
        return f"The pipeline loads in {self.cold_s:.1f} s {first}, and in {self.warm_s:.1f} s again"


NOT_LOADED = LoadTimes()


@dataclass(frozen=True)
class Measurement:
    """One engine at one batch size. `ms`: each timed batch, in order; empty where `left_out` says why.

    `error` is that of the final latents against a float32 run, relative to its norm; `stock_error` is stock's in the
    same run. `first_picture_s` is what is waited for once: from the call that makes the engine ready to its first
    picture; `warm_up_s` goes on until its time settles. `floor_ms` is the least time that the arithmetic of one
    batch can take on this card; `card_ms` is how long the card was busy with one batch, without the gaps.

    `quality`: of an engine that approximates, what its pictures score. Its `error` is against its own definition, and
    `stock_error` that of the definition with stock's ops (lossy.py). Its arithmetic was not counted: it has no floor.
    """

    engine: str
    version: str
    provider: str
    batch: int
    ms: tuple[float, ...]
    steps: int
    first_picture_s: float | None = None
    warm_up_s: float | None = None
    first_run_mib: float | None = None
    second_run_mib: float | None = None
    power_watt: float | None = None
    clock_mhz: float | None = None
    temperature_c: float | None = None
    floor_ms: float | None = None
    error: float | None = None
    stock_error: float | None = None
    left_out: str | None = None
    notes: tuple[str, ...] = ()
    card_ms: float | None = None
    quality: Quality = EXACT

    @property
    def average_ms(self) -> float:
        return fmean(self.ms)

    @property
    def p50_ms(self) -> float:
        return median(self.ms)

    @property
    def p90_ms(self) -> float:
        ordered = sorted(self.ms)
        return ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]

    @property
    def images_per_s(self) -> float:
        return self.batch / self.p50_ms * 1e3

    @property
    def steps_per_s(self) -> float:
        """Of the whole picture, text and VAE included, as most published figures count."""
        return self.steps / self.p50_ms * 1e3

    @property
    def energy_joule(self) -> float | None:
        """Of one picture, from the average power while it was timed."""
        return None if self.power_watt is None or not self.ms else self.power_watt * self.p50_ms / 1e3 / self.batch

    @property
    def floor_percent(self) -> float | None:
        return None if self.floor_ms is None or not self.ms else 100 * self.floor_ms / self.p50_ms


@dataclass(frozen=True)
class Record:
    """`kind`: "engines" side by side, or "ablation", whose measurements add one optimisation each, in order; or "op";
    or "pareto", whose measurements are stock, exact and settings that approximate.

    `complete` is false while a run is under way, or was interrupted; it can be resumed. `op_cases`: for kind "op", the
    call that each batch number stands for, from 1 on.
    """

    kind: str
    workload: WorkloadFacts
    machine: Machine
    command: str
    when: str
    measurements: tuple[Measurement, ...]
    comparisons: tuple[Comparison, ...] = ()
    complete: bool = True
    notes: tuple[str, ...] = ()
    op_cases: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    loading: LoadTimes = NOT_LOADED

    def measurement(self, engine: str, batch: int) -> Measurement | None:
        return next((m for m in self.measurements if m.engine == engine and m.batch == batch), None)

    def turns(self, compared: Comparison) -> int:
        """How many turns a comparison of this record rests on."""
        found = (self.measurement(name, compared.batch) for name in (compared.engine, compared.against))
        return min(0 if one is None else len(one.ms) for one in found)

    @property
    def batches(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(m.batch for m in self.measurements))

    @property
    def engines(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(m.engine for m in self.measurements))

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    def save(self, path: Path) -> None:
        write_text(path, json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Record:
        # NaN comes through to where its place in the record is named.
        return cls.from_dict(read_json(path, partial(UnreadableRecord, path), finite=False), path)

    @classmethod
    def from_dict(cls, values: Any, path: Path) -> Record:
        """What `to_dict` gave; `path` is the file that it was read from."""
        return read_record(cls, values, path, FORMAT, RULES)


def read_record(kind: type[Kind], values: Any, path: Path, wanted: str, rules: Rules) -> Kind:
    """A record of this kind, from values that name `wanted` as their format. Raises UnreadableRecord."""
    if not isinstance(values, dict) or values.get("format") != wanted:
        raise UnreadableRecord(path, f"its format is not {wanted}")
    try:
        return read(kind, {name: value for name, value in values.items() if name != "format"}, rules)
    except Misfit as error:
        raise UnreadableRecord(path, str(error)) from error


def record_file(out: Path, workload: str, kind: str = "engines") -> Path:
    """sd15-512.json, sd15-512-ablation.json, emoji-sd-pareto.json, op-conv2d.json."""
    stem = workload.replace(":", "-")
    return out / (f"{stem}-{kind}.json" if kind in {"ablation", "pareto"} else f"{stem}.json")


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@contextmanager
def continued(file: Path, wanted: Record, *, resume: bool) -> Iterator[Record]:
    """The record of an interrupted run that is the same as `wanted`; otherwise that one, and an older file is kept.

    While it is held, no other process gets `file`: raises RecordInUse there.
    """
    with alone(file, RecordInUse):
        found = _unfinished(file, wanted) if resume else None
        if found is None:
            keep_older(file, Record.load)
        yield found or wanted


def _unfinished(file: Path, wanted: Record) -> Record | None:
    """The record of an interrupted run that is the same as `wanted`; otherwise None, and the reason is said."""
    if not file.exists():
        return None
    try:
        found = Record.load(file)
    except UnreadableRecord as error:
        log.warning("%s Starting anew.", error.message)
        return None
    if found.complete:
        return None
    reason = _other_run(found, wanted)
    if reason:
        log.warning("%s is of another run, with %s: starting anew", file, reason)
        return None
    # What was planned may have grown: more repeats continue a run just as well.
    return replace(found, extra=found.extra | wanted.extra)


def _other_run(found: Record, wanted: Record) -> str | None:
    if found.kind != wanted.kind:
        return f"the kind {found.kind!r}"
    if found.workload != wanted.workload or found.op_cases != wanted.op_cases:
        return "another workload"
    if found.machine != wanted.machine:
        return "another machine or other versions"
    return _other_plan(found, wanted)


def _other_plan(found: Record, wanted: Record) -> str | None:
    before, now = found.extra.get("planned"), wanted.extra.get("planned", {})
    if not isinstance(before, dict):
        return "another plan"
    for name in now:
        if name != "repeats" and before.get(name) != now[name]:
            return f"{name} {before.get(name)} and not {now[name]}"
    engines, batches = now.get("engines", {}), now.get("batches", range(1, len(found.op_cases) + 1))
    known = {STOCK, *engines} if found.kind == "op" else set(engines)
    if any(one.engine not in known or one.batch not in batches for one in found.measurements):
        return "measurements that were not planned"
    return None


def keep_older(file: Path, load: Callable[[Path], Any]) -> None:
    """Measurements are never overwritten: an older record is renamed after its time."""
    if not file.exists():
        return
    try:
        stamp = load(file).when.split("+")[0].replace(":", "").replace("-", "")
    except UnreadableRecord:
        stamp = "unreadable"
    aside, number = file.with_name(f"{file.stem}-{stamp}{file.suffix}"), 1
    while aside.exists():
        number += 1
        aside = file.with_name(f"{file.stem}-{stamp}-{number}{file.suffix}")
    file.rename(aside)
