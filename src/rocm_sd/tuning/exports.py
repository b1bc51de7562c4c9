"""A performance database as one JSON file, to keep or to carry to another machine.

A file may come from anyone: it is taken whole or not at all. One that is there is never replaced by less.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from rocm_sd.errors import InvalidOption, RocmSdError
from rocm_sd.files import write_text
from rocm_sd.plain_json import read_json
from rocm_sd.tuning.entries import RULES, Entry, Quarantined, now
from rocm_sd.typed_json import Rules, read

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import TypeVar

    Dated = TypeVar("Dated", Entry, Quarantined)

__all__ = ["Export", "read_export", "write_export"]

_FORMAT = "rocm-sd tuning database"
_VERSION = 1
_RULES: Rules = {**RULES, "Export.format": {"enum": [_FORMAT]}, "Export.version": {"enum": [_VERSION]}}
# An entry has 700 bytes: more than half a million of them.
_MOST_BYTES = 384 * 2**20
# The format is the first that stands in it.
_HEAD = 200
# Clocks of two machines differ; what is further ahead than this would be the newest for ever.
_AHEAD = timedelta(hours=1)


@dataclass(frozen=True)
class Export:
    format: str
    version: int
    measurements: tuple[Entry, ...]
    quarantine: tuple[Quarantined, ...]


def read_export(path: Path) -> Export:
    """Raises InvalidOption, with all that is wrong. What is dated a little ahead was measured now."""

    def refused(why: str) -> InvalidOption:
        return InvalidOption("tuning data", str(path), [], hint=why)

    # NaN comes through to where its place is named.
    values = read_json(path, lambda why: refused(f"It cannot be read: {why}."), finite=False, most=_MOST_BYTES)
    try:
        found = read(Export, values, _RULES)
    except ValueError as error:
        raise refused(f"It is not what an export of rocm-sd holds: {error}.") from error
    here, latest = now(), now(_AHEAD)
    dates = [*(one.when for one in found.measurements), *(one.when for one in found.quarantine)]
    ahead = [when for when in dates if when > latest]
    if ahead:
        raise refused(
            f"{len(ahead)} of its {len(dates)} entries are dated in the future, up to {max(ahead)[:10]}, and would win "
            "over everything that is measured here. Set the clock of the machine that wrote them, measure there again, "
            "and export anew."
        )
    return replace(
        found,
        measurements=tuple(_dated(one, here) for one in found.measurements),
        quarantine=tuple(_dated(one, here) for one in found.quarantine),
    )


def write_export(path: Path, entries: Sequence[Entry], quarantined: Sequence[Quarantined]) -> int:
    """How many of both is the answer. Raises RocmSdError where `path` has measurements that are not among these."""
    # A folder that is not there was mistyped, and is not made.
    path.parent.stat()
    _require_more(path, entries)
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "measurements": [entry.to_dict() for entry in entries],
        "quarantine": [vars(one) | {"environment": vars(one.environment)} for one in quarantined],
    }
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")
    return len(entries) + len(quarantined)


def _require_more(path: Path, entries: Sequence[Entry]) -> None:
    if not path.is_file():
        return
    try:
        before = read_export(path).measurements
    except InvalidOption as error:
        with path.open("rb") as file:
            if _FORMAT.encode() not in file.read(_HEAD):
                return  # of another kind
        # Of a later rocm-sd, or of a machine whose clock was ahead: what it has is no less measured.
        raise RocmSdError(
            f"{path} is an export that cannot be read here, and is left as it is: {error.hint}",
            hint="Name another file with --export.",
        ) from error
    known = {entry.key() for entry in entries}
    missing = sum(entry.key() not in known for entry in before)
    if missing:
        raise RocmSdError(
            f"{path} has {missing} measurements that the database has not: it is left as it is.",
            hint=f"Take them in first: rocm-sd tune --import {path}; or name another file.",
        )


def _dated(one: Dated, latest: str) -> Dated:
    return replace(one, when=latest) if one.when > latest else one
