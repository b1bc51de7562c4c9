"""A record that is given to the public performance database: nothing personal in it, signed off, and checked.

`write` makes the file that `rocm-sd bench --submit` leaves behind. `validate` says in words what is wrong with one: its
form, its hash, and figures that cannot be or that nobody can stand behind.
"""

from __future__ import annotations

import json
import re
from functools import partial
from typing import TYPE_CHECKING, Any

from rocm_sd import arch
from rocm_sd.bench import verdict
from rocm_sd.bench.publishing import (
    NAME,
    STATEMENT,
    PersonalData,
    digest,
    names_of_this_machine,
    personal,
    shortened_paths,
    unprintable,
    why_no_time,
)
from rocm_sd.bench.records import FORMAT as RECORD_FORMAT
from rocm_sd.bench.records import RULES, Record, UnreadableRecord
from rocm_sd.errors import RocmSdError
from rocm_sd.files import write_text
from rocm_sd.plain_json import read_json
from rocm_sd.typed_json import Rules, schema, violations

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rocm_sd.bench.records import Comparison, Measurement

__all__ = [
    "FORMAT", "GATE", "LEAST_TURNS", "LOSSY_GATE", "PUBLIC_RULES", "RECORD_SCHEMA", "SCHEMA", "STATEMENT",
    "PersonalData", "Unpublishable", "file_name", "implausible", "load", "personal", "validate", "write",
]  # fmt: skip

FORMAT = "rocm-sd-contribution/1"
# Three turns cannot tell a difference from chance.
LEAST_TURNS = 4
# An engine's error may be this many times stock's, as in every benchmark of this project.
GATE = 1.5
# One that approximates is compared with its own definition over all steps.
LOSSY_GATE = 2.0
# A card may clock above its data sheet, and an engine may need fewer operations than were counted: convolutions after
# an enlargement as four small ones leave 0.65 of a VAE's.
_ABOVE_PEAK = 2.0
# A comparison is of paired turns, the measurements of all of them: medians differ a little.
_RATIO_APART = 1.25
_OWN_REFERENCE = {"stock"}
# A run has a few kilobytes, with memory over time 20.
_MOST_BYTES = 2**20
_NAMES = (
    "Machine.device", "Machine.driver", "Machine.system", "WorkloadFacts.name", "WorkloadFacts.model",
    "WorkloadFacts.weights", "WorkloadFacts.scheduler", "WorkloadFacts.dtype", "Measurement.engine",
    "Measurement.version", "Measurement.provider", "Comparison.engine", "Comparison.against",
)  # fmt: skip


_OF_A_PICTURE = tuple(f"WorkloadFacts.{name}" for name in ("height", "width", "steps"))
# Of a record that may be published more is asked than of one that can be read: those of single ops have no picture.
PUBLIC_RULES: Rules = {
    **RULES,
    **{name: {**RULES[name], "minimum": 1} for name in _OF_A_PICTURE},
    **dict.fromkeys(_NAMES, NAME),
    "Quality.name": {"pattern": "^[a-z0-9=.,]+$", "maxLength": 200},
    "Machine.versions": {"propertyNames": NAME, "additionalProperties": {"type": "string", **NAME}},
    "Machine.arch": {"pattern": "^(gfx[0-9a-f]+|sm_[0-9]+|cpu)$", "maxLength": 20},
    "WorkloadFacts.flops": {"exclusiveMinimum": 0, "maximum": 1e30},
    "Record.measurements": {"minItems": 1},
}
RECORD_SCHEMA = schema(Record, PUBLIC_RULES)
RECORD_SCHEMA["properties"] = {"format": {"enum": [RECORD_FORMAT]}, **RECORD_SCHEMA["properties"]}
RECORD_SCHEMA["required"] = ["format", *RECORD_SCHEMA["required"]]
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "A contribution to the rocm-sd performance database",
    "type": "object",
    "properties": {
        "format": {"enum": [FORMAT]},
        "statement": {"enum": [STATEMENT]},
        "record": RECORD_SCHEMA,
        "sha256": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
    },
    "required": ["format", "statement", "record"],
    "additionalProperties": False,
}


class _Unreadable(Exception):
    """Its text is what is wrong with the file."""


class Unpublishable(RocmSdError):
    """A record that the database would not take."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__(
            f"The record is not written for publication: {'; '.join(problems)}.",
            hint="Run the whole benchmark again: rocm-sd bench WORKLOAD --out FOLDER",
        )
        self.problems = problems


def write(record: Record, path: Path) -> Path:
    """The record as a contribution, at `path`, or in the folder `path` under its own name; returns where it is.

    Whoever calls this has shown `STATEMENT` to the user, and the user agreed to it.
    """
    body = _body(record)
    found = (*personal(body), *names_of_this_machine(body))
    if found:
        raise PersonalData(found)
    problems = _of_body(body, path)
    if problems:
        raise Unpublishable(problems)
    folder = path.is_dir() or not path.suffix
    target = path / _named(body) if folder else path
    write_text(target, json.dumps({**body, "sha256": digest(body)}, indent=2, ensure_ascii=False) + "\n")
    return target


def file_name(record: Record) -> str:
    """<arch>-<workload>-<first 8 digits of the hash>.json"""
    return _named(_body(record))


def _named(body: dict[str, Any]) -> str:
    record = body["record"]
    words = (record["machine"]["arch"], record["workload"]["name"], digest(body)[:8])
    return "-".join(re.sub(r"[^A-Za-z0-9_.-]+", "_", word) for word in words) + ".json"


def _body(record: Record) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "statement": STATEMENT,
        "record": shortened_paths(json.loads(json.dumps(record.to_dict()))),
    }


def load(path: Path) -> Record:
    """The record inside of a contribution; `validate` first, this checks no more than `Record.load`."""
    values = read_json(path, partial(UnreadableRecord, path), finite=False, most=_MOST_BYTES)
    if not isinstance(values, dict) or "record" not in values:
        raise UnreadableRecord(path, "it is no contribution")
    return Record.from_dict(values["record"], path)


def _of_body(body: dict[str, Any], path: Path) -> tuple[str, ...]:
    """What is wrong with the form or the figures."""
    wrong = violations(body, SCHEMA) or tuple(unprintable(body))
    return wrong or implausible(Record.from_dict(body["record"], path))


def validate(path: Path) -> tuple[str, ...]:
    """What is wrong with a contribution, in words; nothing if it can be listed."""
    if not path.exists():
        return ("there is no such file",)
    try:
        values = read_json(path, _Unreadable, finite=False, most=_MOST_BYTES)
    except _Unreadable as error:
        return (f"it cannot be read: {error}",)
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        return (f"its format is not {FORMAT}",)
    if values.get("sha256") != digest(values):
        return ("its hash is not that of its content: it was changed after it was written",)
    problems = [*_of_body({key: value for key, value in values.items() if key != "sha256"}, path), *personal(values)]
    if not problems and path.name != _named(values):
        problems.append(f"its name should be {_named(values)}")
    return tuple(problems)


def implausible(record: Record, *, known_arch: bool = True) -> tuple[str, ...]:
    """`known_arch`: what comes from a card that nobody knows is refused."""
    of_record = _of_record(record, known_arch=known_arch)
    return tuple(dict.fromkeys([*of_record, *_of_measurements(record), *_of_comparisons(record)]))


def _of_record(record: Record, *, known_arch: bool) -> Iterator[str]:
    no_time = why_no_time(record.when)
    if no_time is not None:
        yield no_time
    if not record.complete:
        yield "the run was not finished"
    if known_arch and not arch.get(record.machine.arch).known:
        yield f"the architecture {record.machine.arch} is not known here"
    if record.workload.name.endswith("-tiny"):
        yield "it is a trial with a small model, not a measurement"
    if record.kind == "pareto":
        yield "it is a survey of settings: measure the engines rocm-sd-high and rocm-sd-balanced"
    if not any(measured.ms for measured in record.measurements):
        yield "nothing was timed"
    timed = {measured.engine for measured in record.measurements if measured.ms}
    if record.kind != "op" and not record.comparisons and len(timed) > 1:
        yield "engines were timed side by side, and not compared"


def _of_measurements(record: Record) -> Iterator[str]:
    seen = set()
    for measured in record.measurements:
        name = f"{measured.engine} at batch {measured.batch}"
        if (measured.engine, measured.batch) in seen:
            yield f"{name} is there twice"
        seen.add((measured.engine, measured.batch))
        if not measured.ms:
            if measured.left_out is None:
                yield f"{name} has no timings, and does not say why"
            continue
        yield from (f"{name} {problem}" for problem in _of_one(record, measured))


def _of_one(record: Record, measured: Measurement) -> Iterator[str]:
    if len(measured.ms) < LEAST_TURNS:
        yield f"was timed {len(measured.ms)} times, and {LEAST_TURNS} are the least"
    if measured.floor_ms is not None and measured.p50_ms < measured.floor_ms:
        yield f"is faster than its own floor of {measured.floor_ms:.3g} ms"
    yield from verdict.problems(measured.engine, measured.quality)
    # Of an engine that leaves out work nobody has counted what is left.
    least = None if measured.quality.is_lossy else _least_ms(record, measured)
    if least is not None and measured.p50_ms < least:
        yield f"takes {measured.p50_ms:.3g} ms, and the arithmetic alone takes {least:.3g} ms on this card"
    gate = LOSSY_GATE if measured.quality.is_lossy else GATE
    if measured.error is None:
        # The pictures of an approximation that has no definition in float64 were compared.
        if measured.engine not in _OWN_REFERENCE and not measured.quality.is_scored:
            yield "was timed, and its result was compared with nothing"
    elif measured.stock_error is not None and measured.error > gate * measured.stock_error:
        yield f"has an error of {measured.error:.2g}, more than {gate} times stock's {measured.stock_error:.2g}"


def _least_ms(record: Record, measured: Measurement) -> float | None:
    """By the table's peak for as many compute units as the card has; None where either is not known."""
    card = arch.get(record.machine.arch)
    peak = card.peak(record.workload.dtype)
    if record.kind == "op" or record.workload.flops is None or peak is None or not card.compute_units:
        return None
    units = record.machine.compute_units or card.compute_units
    rate = peak * 1e12 * units / card.compute_units
    return record.workload.flops * measured.batch / rate / _ABOVE_PEAK * 1e3


def _of_comparisons(record: Record) -> Iterator[str]:
    for compared in record.comparisons:
        name = f"{compared.engine} against {compared.against} at batch {compared.batch}"
        yield from (f"{name}: {problem}" for problem in _of_comparison(record, compared))


def _of_comparison(record: Record, compared: Comparison) -> Iterator[str]:
    if not compared.low <= compared.ratio <= compared.high:
        yield f"the interval {compared.low:.3g} to {compared.high:.3g} does not hold the ratio {compared.ratio:.3g}"
    if compared.verdict != "no difference" and compared.low <= 1 <= compared.high:
        yield f"it is called {compared.verdict}, and the interval contains 1"
    if (compared.verdict == "faster" and compared.ratio < 1) or (compared.verdict == "slower" and compared.ratio > 1):
        yield f"it is called {compared.verdict}, and the ratio is {compared.ratio:.3g}"
    ours = record.measurement(compared.engine, compared.batch)
    theirs = record.measurement(compared.against, compared.batch)
    if ours is None or theirs is None or not ours.ms or not theirs.ms:
        yield "one of the two was not timed"
        return
    ratio = theirs.p50_ms / ours.p50_ms
    if not 1 / _RATIO_APART <= compared.ratio / ratio <= _RATIO_APART:
        yield f"the ratio is {compared.ratio:.3g}, and the timings say {ratio:.3g}"
