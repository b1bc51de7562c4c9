"""What `rocm-sd contribute` found on one machine, as one file: every part with its state, and whole records of bench.

A part has items (a check, an implementation of an op, a workload), each passed, failed with the reason, or skipped with
the reason. A failure is what such a file is for. `write` takes out what names a person, a folder or a machine;
`validate` says in words what is wrong with a file that somebody sent; `load` reads one.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rocm_sd.bench import submission
from rocm_sd.bench.publishing import STATEMENT, PersonalData, cleaned, digest, personal, unprintable, why_no_time
from rocm_sd.bench.records import Machine, Record, UnreadableRecord
from rocm_sd.files import write_text
from rocm_sd.plain_json import read_json
from rocm_sd.typed_json import Misfit, Rules, read, schema, violations

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "FAILED", "FORMAT", "PART_RULES", "PASSED", "SCHEMA", "SKIPPED", "CardReport", "Item", "Part", "State", "counted",
    "file_name", "from_dict", "load", "publishable", "state_of", "validate", "write",
]  # fmt: skip

FORMAT = "rocm-sd-card-report/1"
State = Literal["passed", "failed", "skipped"]
PASSED: State = "passed"
FAILED: State = "failed"
SKIPPED: State = "skipped"
# A run has about 60 kilobytes.
_MOST_BYTES = 4 * 2**20
_MOST_ITEMS = 2000
# As a page shows it, and with what parts the sizes of a problem.
_ITEM_NAME = {"pattern": r"^[A-Za-z0-9 .,:;_+/()@=*-]+$", "maxLength": 300}
_SECONDS = {"minimum": 0, "maximum": 1e7}
_LONGEST_REASON = 2000
# Records inside of a file have none of their own.
_NOWHERE = Path("record")
PART_RULES: Rules = {
    **submission.PUBLIC_RULES,
    "Item.name": _ITEM_NAME,
    "Item.state": {"enum": [PASSED, FAILED, SKIPPED]},
    "Item.reason": {"maxLength": _LONGEST_REASON},
    "Item.seconds": _SECONDS,
    "Item.figures": {"propertyNames": {"pattern": "^[a-z0-9_]+$", "maxLength": 60}},
    "Part.name": {"pattern": "^[a-z0-9-]+$", "maxLength": 40},
    "Part.state": {"enum": [PASSED, FAILED, SKIPPED]},
    "Part.summary": {"maxLength": _LONGEST_REASON},
    "Part.seconds": _SECONDS,
    "CardReport.seconds": _SECONDS,
}


@dataclass(frozen=True)
class Item:
    """`reason`: why it failed or was skipped, and what there is to say of one that passed."""

    name: str
    state: str
    reason: str = ""
    seconds: float = 0.0
    figures: dict[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """`summary`: in one sentence; `records`: of bench, whole; `data`: what else the part has to say, as plain JSON."""

    name: str
    state: str
    summary: str
    items: tuple[Item, ...]
    seconds: float = 0.0
    records: tuple[dict[str, Any], ...] = ()
    data: dict[str, Any] = field(default_factory=dict)

    def of(self, state: State) -> tuple[Item, ...]:
        return tuple(item for item in self.items if item.state == state)


@dataclass(frozen=True)
class CardReport:
    machine: Machine
    command: str
    when: str
    seconds: float
    parts: tuple[Part, ...]

    def records(self, path: Path) -> tuple[Record, ...]:
        """Those of bench; `path` is the file that it was read from."""
        return tuple(Record.from_dict(values, path) for part in self.parts for values in part.records)


SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "What rocm-sd contribute found on one machine",
    "type": "object",
    "properties": {
        "format": {"enum": [FORMAT]},
        "statement": {"enum": [STATEMENT]},
        "report": schema(CardReport, {**PART_RULES, "Part.records": {"items": submission.RECORD_SCHEMA}}),
        "sha256": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
    },
    "required": ["format", "statement", "report"],
    "additionalProperties": False,
}


class _Unreadable(Exception):
    """Its text is what is wrong with the file."""


def state_of(items: Sequence[Item]) -> State:
    """Failed where anything failed; skipped where nothing ran."""
    states = {item.state for item in items}
    return FAILED if FAILED in states else PASSED if PASSED in states else SKIPPED


def counted(parts: Sequence[Part]) -> str:
    """Such as: 5 of 6 parts passed, 1 failed."""
    states = Counter(part.state for part in parts)
    rest = [f"{states[state]} {state}" for state in (FAILED, SKIPPED) if states[state]]
    return ", ".join([f"{states[PASSED]} of {len(parts)} parts passed", *rest])


def publishable(report: CardReport) -> dict[str, Any]:
    """All of the file but its hash, with nothing personal in it. Raises PersonalData, Unpublishable."""
    values = json.loads(json.dumps(asdict(report)))
    for part in values["parts"]:
        part["data"], part["summary"] = cleaned(part["data"]), cleaned(part["summary"])[:_LONGEST_REASON]
        for item in part["items"]:
            item["reason"], item["figures"] = cleaned(item["reason"])[:_LONGEST_REASON], cleaned(item["figures"])
        for record in part["records"]:
            record["notes"] = cleaned(record.get("notes", []))
            for measured in record["measurements"]:
                measured["notes"], measured["left_out"] = cleaned(measured["notes"]), cleaned(measured["left_out"])
    body = {"format": FORMAT, "statement": STATEMENT, "report": values}
    found = personal(body)
    if found:
        raise PersonalData(found)
    problems = _of_body(body)
    if problems:
        raise submission.Unpublishable(problems)
    return body


def file_name(body: dict[str, Any]) -> str:
    """rocm-sd-contribution-<arch>-<day>-<first 8 digits of the hash>.json"""
    report = body["report"]
    words = ("rocm-sd-contribution", report["machine"]["arch"], report["when"][:10], digest(body)[:8])
    return "-".join(re.sub(r"[^A-Za-z0-9_.-]+", "_", word) for word in words) + ".json"


def write(body: dict[str, Any], folder: Path) -> Path:
    """What `publishable` gave, whole, under its own name; the user has agreed to the statement in it."""
    target = folder / file_name(body)
    write_text(target, json.dumps({**body, "sha256": digest(body)}, indent=1, ensure_ascii=False) + "\n")
    return target


def load(path: Path) -> CardReport:
    """Raises UnreadableRecord; what can be read may still be wrong, as `validate` says."""
    return from_dict(read_json(path, partial(UnreadableRecord, path), of=dict, most=_MOST_BYTES), path)


def from_dict(values: dict[str, Any], path: Path) -> CardReport:
    if values.get("format") != FORMAT:
        raise UnreadableRecord(path, f"its format is not {FORMAT}")
    try:
        return read(CardReport, values.get("report"), PART_RULES)
    except Misfit as error:
        raise UnreadableRecord(path, str(error)) from error


def validate(path: Path) -> tuple[str, ...]:
    """What is wrong with the file, in words; nothing if it can be listed."""
    if not path.exists():
        return ("there is no such file",)
    try:
        values = read_json(path, _Unreadable, most=_MOST_BYTES)
    except _Unreadable as error:
        return (f"it cannot be read: {error}",)
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        return (f"its format is not {FORMAT}",)
    if values.get("sha256") != digest(values):
        return ("its hash is not that of its content: it was changed after it was written",)
    body = {key: value for key, value in values.items() if key != "sha256"}
    problems = [*_of_body(body), *personal(body)]
    if not problems and path.name != file_name(body):
        problems.append(f"its name should be {file_name(body)}")
    return tuple(problems)


def _of_body(body: dict[str, Any]) -> tuple[str, ...]:
    """What is wrong with the form or the figures."""
    wrong = violations(body, SCHEMA) or tuple(unprintable(body))
    return wrong or tuple(dict.fromkeys(_implausible(read(CardReport, body["report"], PART_RULES))))


def _implausible(report: CardReport) -> Iterator[str]:
    no_time = why_no_time(report.when)
    if no_time is not None:
        yield no_time
    names = Counter(part.name for part in report.parts)
    yield from (f"the part {name} is there {times} times" for name, times in names.items() if times > 1)
    if not any(item.state != SKIPPED for part in report.parts for item in part.items):
        yield "nothing was run"
    if sum(len(part.items) for part in report.parts) > _MOST_ITEMS:
        yield f"it has more than {_MOST_ITEMS} items"
    for part in report.parts:
        if part.state != state_of(part.items):
            yield f"{part.name} is called {part.state}, and its items are not"
        yield from (
            f"{part.name}: {item.name} is {item.state}, and does not say why"
            for item in part.items
            if item.state != PASSED and not item.reason.strip()
        )
        for values in part.records:
            record = Record.from_dict(values, _NOWHERE)
            where = f"{part.name}, {record.workload.name}"
            yield from (f"{where}: {problem}" for problem in submission.implausible(record, known_arch=False))
            if record.machine.arch != report.machine.arch:
                yield f"{where}: it was measured on {record.machine.arch}, and not on {report.machine.arch}"
