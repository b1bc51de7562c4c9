"""What a report is made from: records of engines, of servers and of several GPUs, timings of single ops in either
format, contributions, and results of the proof ladder.

Every value that is shown or drawn is checked here. A file that is broken is named, and nothing is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from rocm_sd.bench import card_report
from rocm_sd.bench.records import FORMAT, Record, UnreadableRecord
from rocm_sd.bench.serving import FORMAT as SERVING_FORMAT
from rocm_sd.bench.serving import ServingRecord
from rocm_sd.bench.several_gpus_record import FORMAT as GPUS_FORMAT
from rocm_sd.bench.several_gpus_record import GpusRecord
from rocm_sd.bench.verdict import problems
from rocm_sd.errors import RocmSdError
from rocm_sd.plain_json import read_json, shortened
from rocm_sd.typed_json import is_number

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from rocm_sd.bench.card_report import CardReport

_LEAST_US, _MOST_US = 1e-6, 1e12

__all__ = ["Inputs", "OpRun", "OpTiming", "UnreadableLadder", "newest", "read", "read_ladder"]


class UnreadableLadder(RocmSdError):
    """A file that is not what `rocm-sd verify --json` prints."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f"{path} is not a result of the proof ladder: {why}.",
            hint="Type: rocm-sd verify --json > ladder.json, or let it be made: rocm-sd report --ladder run",
        )


@dataclass(frozen=True)
class OpTiming:
    """One call of one op; times in microseconds. `ours` is None where it was skipped, and `why_skipped` says why."""

    op: str
    call: str
    dtype: str
    ours: float | None
    stock: float | None
    implementation: str
    why_skipped: str | None = None


@dataclass(frozen=True)
class OpRun:
    device: str
    arch: str
    command: str
    timings: tuple[OpTiming, ...]
    note: str = ""


@dataclass(frozen=True)
class Inputs:
    """`records`: those of engines are `timed`, those of servers `served`, those of several GPUs `split`. `skipped` are
    files of a folder that hold something else. `contributed`: what `rocm-sd contribute` wrote; its records are among
    the others.
    """

    records: tuple[Record | ServingRecord | GpusRecord, ...] = ()
    op_runs: tuple[OpRun, ...] = ()
    skipped: tuple[str, ...] = ()
    contributed: tuple[CardReport, ...] = ()

    @property
    def timed(self) -> tuple[Record, ...]:
        return tuple(record for record in self.records if isinstance(record, Record))

    @property
    def served(self) -> tuple[ServingRecord, ...]:
        return tuple(record for record in self.records if isinstance(record, ServingRecord))

    @property
    def split(self) -> tuple[GpusRecord, ...]:
        return tuple(record for record in self.records if isinstance(record, GpusRecord))


def read(paths: Iterable[Path]) -> Inputs:
    """Files given by name must be readable; of a folder, those that are of no such format are skipped and named."""
    records: list[Record | ServingRecord | GpusRecord] = []
    op_runs: list[OpRun] = []
    skipped: list[str] = []
    contributed: list[CardReport] = []
    given = dict.fromkeys(paths)
    named = [path for path in given if not path.is_dir()]
    found = {
        file: folder
        for folder in given
        if folder.is_dir()
        for file in sorted(folder.rglob("*.json"))
        if file not in named
    }
    for path in [*named, *found]:
        values = _json(path, named=path in named)
        if isinstance(values, dict) and values.get("format") == FORMAT:
            record = Record.from_dict(values, path)
            _require_sense(record, path)
            if record.kind == "op":
                op_runs.append(_op_run(record))
            else:
                records.append(record)
        elif isinstance(values, dict) and values.get("format") == SERVING_FORMAT:
            records.append(ServingRecord.from_dict(values, path))
        elif isinstance(values, dict) and values.get("format") == GPUS_FORMAT:
            records.append(GpusRecord.from_dict(values, path))
        elif isinstance(values, dict) and values.get("format") == card_report.FORMAT:
            contributed.append(card_report.from_dict(values, path))
            inside = contributed[-1].records(path)
            for record in inside:
                _require_sense(record, path)
            records += inside
        elif isinstance(values, dict) and isinstance(values.get("rows"), list) and "op" in values:
            op_runs.append(_old_op_run(values, path))
        elif path in named:
            known = f"{FORMAT}, {SERVING_FORMAT}, {GPUS_FORMAT}, {card_report.FORMAT} nor that of benchmarks/ops.py"
            raise UnreadableRecord(path, f"its format is neither {known}")
        else:
            skipped.append(str(path.relative_to(found[path])))
    return Inputs(tuple(records), tuple(op_runs), tuple(skipped), tuple(contributed))


def newest(folder: Path) -> list[Path]:
    """Of a folder's records the last of each kind of run: older ones of the same are kept beside it."""
    last: dict[tuple[str, ...], tuple[str, Path]] = {}
    for path in sorted(folder.glob("*.json")):
        values = _json(path, named=False)
        if not isinstance(values, dict) or values.get("format") not in {FORMAT, SERVING_FORMAT, GPUS_FORMAT}:
            continue
        workload = values.get("workload")
        name = workload.get("name") if isinstance(workload, dict) else ""
        cards = values.get("cards")
        ranks = len(cards) if isinstance(cards, list) else 1
        what = (str(values["format"]), str(values.get("kind")), str(name), str(ranks))
        found = (str(values.get("when")), path)
        last[what] = max(last.get(what, found), found)
    return sorted(path for _, path in last.values())


def _require_sense(record: Record, path: Path) -> None:
    """Raises `UnreadableRecord` where values that are right one by one contradict each other."""

    def require(met: bool, sentence: str) -> None:
        if not met:
            raise UnreadableRecord(path, sentence)

    for m in record.measurements:
        where = f"{m.engine!r} at batch {m.batch}"
        explained = bool(m.ms) or m.left_out is not None or not record.complete
        require(explained, f"{where} has neither timings nor a reason")
        require(not (m.ms and m.left_out), f"{where} was skipped and has timings")
        unscored = next(problems(m.engine, m.quality, claims=False), "") if m.ms else ""
        require(not unscored, f"{where} {unscored}")
    for c in record.comparisons:
        require(c.low <= c.high, f"the interval of {c.engine!r} against {c.against!r} is inside out")
    if record.kind == "op":
        described = all(m.batch <= len(record.op_cases) for m in record.measurements)
        require(described, "a case of an op is not described")


def _json(path: Path, *, named: bool) -> Any:
    try:
        return read_json(path, partial(UnreadableRecord, path), finite=False)
    except UnreadableRecord:
        if named:
            raise
        return None


def _op_run(record: Record) -> OpRun:
    """Of a record of kind "op": the case that each batch number stands for, ours and stock."""
    whole = record.workload.name.removeprefix("op:")
    timings = []
    for batch in record.batches:
        case = record.op_cases[batch - 1]
        # The op stands in front of its call: a record may hold one op, or all.
        op, _, call = case.partition(" ")
        op, call = (op, call) if whole in {"ops", "gemm", op} else (whole, case)
        stock = record.measurement("stock", batch)
        ours = next((m for m in record.measurements if m.batch == batch and m.engine != "stock"), None)
        subject = ours or stock
        timings.append(
            OpTiming(
                op,
                call,
                _dtype(call) or record.workload.dtype,
                ours.p50_ms * 1e3 if ours and ours.ms else None,
                stock.p50_ms * 1e3 if stock and stock.ms else None,
                subject.provider if subject else "",
                ours.left_out if ours else None,
            )
        )
    note = "" if record.complete else "The run was interrupted; this is what it has."
    return OpRun(record.machine.device, record.machine.arch, record.command, tuple(timings), note)


def _dtype(call: str) -> str | None:
    """Calls end with their dtype, or have it between commas: "2x320x64x64 in 32 groups, float16, no add"."""
    parts = [part.strip() for part in call.split(",")]
    return next((part for part in parts if part in {"float16", "bfloat16", "float32", "float8", "int8"}), None)


def _old_op_run(values: dict[str, Any], path: Path) -> OpRun:
    """What benchmarks/ops.py wrote: `us` of each implementation, "stock" among them."""
    try:
        machine, timings = values["machine"], []
        for row in values["rows"]:
            name = row["implementation"]
            us = row["us"]
            ours, stock = us.get("stock" if name == "torch" else name), us.get("stock")
            if not all(is_number(value) and _LEAST_US < value < _MOST_US for value in (ours, stock)):
                raise UnreadableRecord(path, f"a timing of {shortened(repr(row['call']))} is no time of a call")
            dtype = str(row["problem"].get("dtype") or _dtype(row["call"]) or "float16")
            timings.append(OpTiming(str(values["op"]), str(row["call"]), dtype, ours, stock, str(name)))
        return OpRun(
            str(machine["gpu"]), str(machine["arch"]), str(values["command"]), tuple(timings), _note(values.get("note"))
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise UnreadableRecord(path, f"a field is missing or of another type ({error})") from error


def _note(text: object) -> str:
    return f"{str(text)[:1].upper()}{str(text)[1:]}." if text else ""


Outcome = dict[str, Any]
_STATES: tuple[Literal["passed", "failed", "skipped"], ...] = ("passed", "failed", "skipped")


def read_ladder(path: Path) -> tuple[Outcome, ...]:
    """What `rocm-sd verify --json` prints: a list of outcomes."""
    values = read_json(path, partial(UnreadableLadder, path))
    if not isinstance(values, list) or not values:
        raise UnreadableLadder(path, "it holds no list of outcomes")
    for value in values:
        if not isinstance(value, dict) or not all(
            isinstance(value.get(name), str) for name in ("op", "arch", "rung", "state", "sentence")
        ):
            raise UnreadableLadder(path, "an outcome lacks its op, arch, rung, state or sentence")
        if value["state"] not in _STATES or not isinstance(value.get("figures", {}), dict):
            raise UnreadableLadder(path, f"the state or the figures of {value['op']!r} are not known")
        figures = value.get("figures", {})
        if not all(is_number(figures.get(name, 0)) for name in ("vgprs", "lds", "waves_per_simd")):
            raise UnreadableLadder(path, f"registers, LDS or waves of {value['op']!r} are not numbers")
    return tuple(values)
