"""What a contribution has so far, on disk: killed and typed again, it goes on where it was.

    with keeping(key) as kept:                   # nobody else contributes from this machine meanwhile
        kept.found("bench", "emoji")             # what an earlier run has found, or None
        kept.begin("bench", "emoji")
        kept.finish("bench", "emoji", found)

Something that was begun and never finished ended its process, and perhaps the machine. It is tried twice.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rocm_sd.bench.card_report import PART_RULES, Item
from rocm_sd.bench.records import now
from rocm_sd.errors import RocmSdError
from rocm_sd.files import alone, write_text
from rocm_sd.plain_json import read_json
from rocm_sd.tuning.location import default_path
from rocm_sd.typed_json import Misfit, Rules, read

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Found", "InUse", "Kept", "keeping", "key_of"]

log = logging.getLogger("rocm_sd")
FORMAT = "rocm-sd-contributing/1"
_RULES: Rules = {**PART_RULES, "_State.format": {"enum": [FORMAT]}}
# A first end may be chance, or the user.
MOST_TRIES = 2


class InUse(RocmSdError):
    """Two at once would measure one another."""

    def __init__(self, _file: Path) -> None:
        super().__init__(
            "Another rocm-sd contribute is running on this machine: nothing was measured.",
            hint="Wait for it, since two at once disturb each other.",
        )


class _Unreadable(Exception):
    """Its text is the reason."""


@dataclass(frozen=True)
class Found:
    """What a unit of a part gives. `records` and `data` as in `card_report.Part`."""

    items: tuple[Item, ...]
    records: tuple[dict[str, Any], ...] = ()
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Unit:
    part: str
    name: str
    tries: int
    seconds: float = 0.0
    found: tuple[Found, ...] = ()


@dataclass(frozen=True)
class _State:
    format: str
    begun: str
    units: tuple[_Unit, ...] = ()


class Kept:
    """`folder`: also for what the units themselves keep. `when`: the first of them was begun."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / "state.json"
        self._units: dict[tuple[str, str], _Unit] = {}
        self.when = now()
        self._read()

    @property
    def is_empty(self) -> bool:
        return not self._units

    @property
    def done(self) -> int:
        return sum(bool(unit.found) for unit in self._units.values())

    def found(self, part: str, name: str) -> Found | None:
        unit = self._units.get((part, name))
        return unit.found[0] if unit is not None and unit.found else None

    def seconds(self, part: str, name: str) -> float:
        unit = self._units.get((part, name))
        return unit.seconds if unit is not None else 0.0

    def was_its_end(self, part: str, name: str) -> bool:
        """Whether it was begun as often as it may be, and has never ended."""
        unit = self._units.get((part, name))
        return unit is not None and not unit.found and unit.tries >= MOST_TRIES

    def begin(self, part: str, name: str) -> None:
        before = self._units.get((part, name))
        self._put(_Unit(part, name, 1 + (before.tries if before else 0)))

    def give_up(self, part: str, name: str) -> None:
        """The user has ended it, which says nothing about it."""
        self._units.pop((part, name), None)
        self._write()

    def finish(self, part: str, name: str, found: Found, seconds: float) -> None:
        before = self._units.get((part, name))
        self._put(_Unit(part, name, before.tries if before else 1, round(seconds, 2), (found,)))

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _put(self, unit: _Unit) -> None:
        self._units[unit.part, unit.name] = unit
        self._write()

    def _write(self) -> None:
        state = _State(FORMAT, self.when, tuple(self._units.values()))
        write_text(self._file, json.dumps(asdict(state)) + "\n")

    def _read(self) -> None:
        if not self._file.exists():
            return
        try:
            state = read(_State, read_json(self._file, _Unreadable, of=dict), _RULES)
        except (_Unreadable, Misfit) as error:
            log.warning("what an earlier run has found cannot be read (%s): starting anew", error)
            return
        self.when = state.begun
        self._units = {(unit.part, unit.name): unit for unit in state.units}


def key_of(*facts: Any) -> str:
    """Of the machine and the versions: what was found with others is not continued."""
    plain = json.dumps([asdict(each) if hasattr(each, "__dataclass_fields__") else each for each in facts])
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


@contextmanager
def keeping(key: str, *, fresh: bool = False) -> Iterator[Kept]:
    """What is kept under that key; `fresh` forgets it first. Raises InUse."""
    place = default_path().parent / "contribution"
    with alone(place / "run", InUse):
        folder = place / key
        if fresh:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            yield Kept(folder)
        finally:
            # Nothing is left where nothing was begun.
            with suppress(OSError):
                folder.rmdir()
