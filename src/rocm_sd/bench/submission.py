"""A record that is given to the public performance database: nothing personal in it, signed off, and checked.

`write` makes the file that `rocm-sd bench --submit` leaves behind. `validate` says in words what is wrong with one: its
form, its hash, and figures that cannot be.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import re
import socket
from functools import partial
from typing import TYPE_CHECKING, Any

from rocm_sd.bench.records import FORMAT as RECORD_FORMAT
from rocm_sd.bench.records import RULES, Record, UnreadableRecord
from rocm_sd.bench.submission_checks import implausible
from rocm_sd.errors import RocmSdError
from rocm_sd.files import read_json
from rocm_sd.typed_json import schema, violations

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = [
    "FORMAT",
    "SCHEMA",
    "STATEMENT",
    "PersonalData",
    "Unpublishable",
    "file_name",
    "load",
    "personal",
    "validate",
    "write",
]

FORMAT = "rocm-sd-contribution/1"
STATEMENT = (
    "These figures are my own measurements, made with the command that is given here. "
    "I publish them under CC0 1.0: anyone may use them for anything."
)


# Of a record that may be published more is asked than of one that can be read: those of single ops have no picture.
_RECORD = schema(
    Record,
    {
        **RULES,
        **{f"WorkloadFacts.{name}": {"minimum": 1} for name in ("height", "width", "steps")},
        "Machine.arch": {"pattern": "^(gfx[0-9a-f]+|sm_[0-9]+|cpu)$"},
        "Record.when": {"pattern": r"^\d{4}-\d{2}-\d{2}"},
        "Record.measurements": {"minItems": 1},
    },
)
_RECORD["properties"] = {"format": {"enum": [RECORD_FORMAT]}, **_RECORD["properties"]}
_RECORD["required"] = ["format", *_RECORD["required"]]
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "A contribution to the rocm-sd performance database",
    "type": "object",
    "properties": {
        "format": {"enum": [FORMAT]},
        "statement": {"enum": [STATEMENT]},
        "record": _RECORD,
        "sha256": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
    },
    "required": ["format", "statement", "record"],
    "additionalProperties": False,
}


class PersonalData(RocmSdError):
    """Something in a record names a person, a host or a folder, and cannot be taken out without a guess."""

    def __init__(self, found: tuple[str, ...]) -> None:
        super().__init__(
            f"The record is not written for publication, because {'; '.join(found)}.",
            hint="Run the benchmark again with names that may be public (--model, --out), then --submit.",
        )
        self.found = found


class Unpublishable(RocmSdError):
    """A record that the database would not take."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__(
            f"The record is not written for publication: {'; '.join(problems)}.",
            hint="Run the whole benchmark again: rocm-sd bench WORKLOAD --out FOLDER",
        )
        self.problems = problems


# A path that begins at a root, a drive or a home: only its last part is told.
_PATH = re.compile(r"(?<![\w.:/\\-])(?:~|[A-Za-z]:(?=[/\\])|\\)?(?:[/\\][^\s/\\\"',;()=]+)+[/\\]?")
_HOMES = re.compile(r"(?:/home/|/Users/|/root\b|[A-Za-z]:\\Users\\|~/)")
_MAIL = re.compile(r"[\w.+-]+@[\w-]+\.[\w.-]+")
# Names that tell nothing about anyone, and would be found everywhere.
_NOBODY = {"root", "user", "users", "admin", "ubuntu", "runner", "localhost", "docker", "amd", "nvidia", "rocm", "cuda"}


def write(record: Record, path: Path) -> Path:
    """The record as a contribution, at `path`, or in the folder `path` under its own name; returns where it is.

    Whoever calls this has shown `STATEMENT` to the user, and the user agreed to it.
    """
    body = _body(record)
    found = (*personal(body), *_names_of_this_machine(body))
    if found:
        raise PersonalData(found)
    problems = _of_body(body, path)
    if problems:
        raise Unpublishable(problems)
    folder = path.is_dir() or not path.suffix
    target = path / _named(body) if folder else path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({**body, "sha256": _hash(body)}, indent=2, ensure_ascii=False) + "\n", "utf-8")
    return target


def file_name(record: Record) -> str:
    """<arch>-<workload>-<first 8 digits of the hash>.json"""
    return _named(_body(record))


def _named(body: dict[str, Any]) -> str:
    record = body["record"]
    words = (record["machine"]["arch"], record["workload"]["name"], _hash(body)[:8])
    return "-".join(re.sub(r"[^A-Za-z0-9_.-]+", "_", word) for word in words) + ".json"


def _body(record: Record) -> dict[str, Any]:
    return {"format": FORMAT, "statement": STATEMENT, "record": _shortened(json.loads(json.dumps(record.to_dict())))}


def _hash(body: dict[str, Any]) -> str:
    """Of the JSON with sorted keys and no spaces, the hash itself left out."""
    told = {key: value for key, value in body.items() if key != "sha256"}
    canonical = json.dumps(told, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _shortened(value: Any) -> Any:
    """Every path as its last part."""
    if isinstance(value, dict):
        return {_shortened(key): _shortened(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_shortened(entry) for entry in value]
    if isinstance(value, str):
        return _PATH.sub(lambda path: re.split(r"[/\\]", path[0].rstrip("/\\"))[-1] or "/", value)
    return value


def _texts(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, entry in value.items():
            yield f"a name in {where or 'the file'}", str(key)
            yield from _texts(entry, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list):
        for number, entry in enumerate(value):
            yield from _texts(entry, f"{where}[{number}]")
    elif isinstance(value, str):
        yield where, value


def personal(values: dict[str, Any]) -> tuple[str, ...]:
    """What looks like a home folder or an e-mail address, and where it stands."""
    found = []
    for where, text in _texts(values):
        if _HOMES.search(text):
            found.append(f"{where} names a home folder")
        if _MAIL.search(text):
            found.append(f"{where} has an e-mail address")
    return tuple(dict.fromkeys(found))


def _names_of_this_machine(values: dict[str, Any]) -> tuple[str, ...]:
    """Only its owner's machine can tell its own names; a validator elsewhere cannot."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):
        user = ""
    host = socket.gethostname()
    names = {"the user's name": user, "the host's name": host, "the host's short name": host.split(".")[0]}
    found = []
    for what, name in names.items():
        if len(name) < 3 or name.lower() in _NOBODY:
            continue
        whole = re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-])")
        found += [f"{where} has {what}" for where, text in _texts(values) if whole.search(text)]
    return tuple(dict.fromkeys(found))


def load(path: Path) -> Record:
    """The record inside of a contribution; `validate` first, this checks no more than `Record.load`."""
    values = read_json(path, partial(UnreadableRecord, path))
    if not isinstance(values, dict) or "record" not in values:
        raise UnreadableRecord(path, "it is no contribution")
    return Record.from_dict(values["record"], path)


def _of_body(body: dict[str, Any], path: Path) -> tuple[str, ...]:
    """What is wrong with the form or the figures."""
    return violations(body, SCHEMA) or implausible(Record.from_dict(body["record"], path))


def validate(path: Path) -> tuple[str, ...]:
    """What is wrong with a contribution, in words; nothing if it can be listed."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ("there is no such file",)
    except (OSError, ValueError) as error:
        return (f"it cannot be read: {error}",)
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        return (f"its format is not {FORMAT}",)
    if values.get("sha256") != _hash(values):
        return ("its hash is not that of its content: it was changed after it was written",)
    problems = [*personal(values), *_of_body({key: value for key, value in values.items() if key != "sha256"}, path)]
    if not problems and path.name != _named(values):
        problems.append(f"its name should be {_named(values)}")
    return tuple(problems)
