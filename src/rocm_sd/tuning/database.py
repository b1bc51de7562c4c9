"""What was measured on the user's own card, in one SQLite file: measurements, self-tests, and what is set aside.

Several processes may read and write at once. A file that is corrupt or not this project's is renamed and a new one
begun; one that a later rocm-sd wrote is left as it is. A file that cannot be written is read, and what would be written
lasts as long as the process. Each of these is one warning, and stops nothing.
"""

# ruff: noqa: S608 -- what is put into a question are names of columns; values are always bound
from __future__ import annotations

import os
import socket
import sqlite3
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rocm_sd.errors import RocmSdError
from rocm_sd.tuning.database_file import DAMAGE, Opened, open_file, set_aside, without_file
from rocm_sd.tuning.entries import Entry, Quarantined, now, text
from rocm_sd.tuning.exports import read_export, write_export
from rocm_sd.tuning.location import default_path

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from rocm_sd.tuning.environment import Environment

__all__ = ["Database", "Entry", "Quarantined", "default_path"]

_Row = TypeVar("_Row")
_KEY = ("op", "problem", "environment", "kernel_hash", "candidate", "config")
_VALUE = ("median_us", "low_us", "high_us", "stock_us", "numerics", "taken")
_COLUMNS = ", ".join((*_KEY, *_VALUE))


def _age(table: str) -> str:
    """What orders two measurements by age; of two taken at the same time the slower counts as the newer."""
    times = (f"coalesce({table}.{name}, 9e999)" for name in ("median_us", "low_us", "high_us", "stock_us"))
    return f"({table}.taken, {', '.join(times)}, {table}.numerics)"


_PUT = f"""INSERT INTO measurements ({_COLUMNS}) VALUES ({", ".join("?" * 12)})
    ON CONFLICT ({", ".join(_KEY)}) DO UPDATE SET {", ".join(f"{name} = excluded.{name}" for name in _VALUE)}
    WHERE {_age("excluded")} > {_age("measurements")} OR measurements.taken > ?"""
_QUARANTINE = """INSERT INTO quarantine VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE
    SET reason = excluded.reason, taken = excluded.taken
    WHERE (excluded.taken, excluded.reason) < (quarantine.taken, quarantine.reason)"""
_SET_ASIDE = """EXISTS (SELECT 1 FROM quarantine q WHERE (q.op, q.candidate, q.environment, q.kernel_hash) =
    (m.op, m.candidate, m.environment, m.kernel_hash))"""
_OF_PROBLEM = "op = ? AND problem = ? AND environment = ?"
_OF_CANDIDATE = "(op, candidate, environment, kernel_hash) = (?, ?, ?, ?)"


class Database:
    """One file. Nothing is opened before the first question, and a child process opens it for itself."""

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = default_path() if path is None else Path(path)
        self._opened: Opened | None = None
        self._owner = 0
        self._of_parents: list[Opened] = []
        self._lock = threading.RLock()
        self._lost: str | None = None

    def why_not_kept(self) -> str | None:
        """The reason that what is written ends with this process, or None where it stays."""
        with self._lock:
            return self._open().why_not_kept

    def why_lost(self) -> str | None:
        """The reason that what the file held is not here, or None where it is; damage is found where it is read."""
        with self._lock:
            self._open()
            return self._lost

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Within, questions of this thread see one state of the file, whose lock is taken once for all of them."""
        with self._lock:
            opened = self._open()
            outermost = not opened.connection.in_transaction
            if outermost:
                # It reads nothing yet: a file that fails does so at the first question, which knows what to do.
                opened.connection.execute("BEGIN")
            try:
                yield
            finally:
                # A file that failed meanwhile was closed, and another one took its place.
                if outermost and self._opened is opened and opened.connection.in_transaction:
                    opened.connection.rollback()

    def put(self, entries: Iterable[Entry]) -> None:
        """All of them or none; of two measurements of the same key the newer one is kept."""
        self._write(_PUT, [_put_row(entry) for entry in entries])

    def best(
        self,
        op: str,
        problem: Mapping[str, int | str],
        environment: Environment,
        kernel_hash: str | Collection[str],
        among: Collection[str] | None = None,
    ) -> Entry | None:
        """The fastest whose numerics are ok and that is not set aside, of this problem exactly.

        Candidates without a kernel of this project are stored with an empty hash: they compete with those of any.
        Several hashes are those of several candidates' kernels.
        """
        hashes = _hashes(kernel_hash)
        allowed = "" if among is None else f"AND candidate IN ({_marks(among)})"
        found = self._entries(
            f"""{_OF_PROBLEM} AND kernel_hash IN ({_marks(hashes)}) AND numerics = 'ok' AND median_us IS NOT NULL
            AND NOT {_SET_ASIDE} {allowed} ORDER BY median_us, candidate, config LIMIT 1""",
            (op, text(problem), environment.key(), *hashes, *(among or ())),
        )
        return found[0] if found else None

    def find(
        self,
        op: str,
        problem: Mapping[str, int | str],
        environment: Environment,
        kernel_hash: str | Collection[str],
        candidate: str,
        config: Mapping[str, int],
    ) -> Entry | None:
        """The measurement of one candidate, right or wrong, unless it is set aside."""
        hashes = _hashes(kernel_hash)
        found = self._entries(
            f"""{_OF_PROBLEM} AND kernel_hash IN ({_marks(hashes)}) AND candidate = ? AND config = ?
            AND NOT {_SET_ASIDE}""",
            (op, text(problem), environment.key(), *hashes, candidate, text(config)),
        )
        return found[0] if found else None

    def by_others(
        self, op: str, problem: Mapping[str, int | str], environment: Environment, known: Collection[str]
    ) -> tuple[Entry, ...]:
        """Every measurement of this problem by candidates of other names, right or wrong, set aside or not."""
        return self._entries(
            f"{_OF_PROBLEM} AND candidate NOT IN ({_marks(known)}) ORDER BY {', '.join(_KEY)}",
            (op, text(problem), environment.key(), *known),
        )

    def all(self, op: str | None = None, environment: Environment | None = None) -> tuple[Entry, ...]:
        """Every measurement, right or wrong, set aside or not; of one op or environment where it is named."""
        return self._entries(
            f"""(:op IS NULL OR op = :op) AND (:environment IS NULL OR environment = :environment)
            ORDER BY {", ".join(_KEY)}""",
            {"op": op, "environment": environment and environment.key()},
        )

    def count(self, environment: Environment | None = None) -> int:
        sql = "SELECT COUNT(*) FROM measurements WHERE :environment IS NULL OR environment = :environment"
        return int(self._ask(sql, {"environment": environment and environment.key()}, _first)[0])

    def quarantine(self, op: str, candidate: str, environment: Environment, kernel_hash: str, reason: str) -> None:
        """Never choose it there again; the first reason is kept."""
        self._quarantine([Quarantined(op, candidate, environment, kernel_hash, reason, now())])

    def quarantined(self, environment: Environment | None = None) -> tuple[Quarantined, ...]:
        """What is set aside in this environment; in every environment, where none is named."""
        sql = """SELECT * FROM quarantine WHERE :environment IS NULL OR environment = :environment
            ORDER BY op, candidate, taken"""
        return tuple(self._ask(sql, {"environment": environment and environment.key()}, Quarantined.from_row))

    def why_quarantined(self, op: str, candidate: str, environment: Environment, kernel_hash: str) -> str | None:
        sql = f"SELECT reason FROM quarantine WHERE {_OF_CANDIDATE}"
        found = self._ask(sql, (op, candidate, environment.key(), kernel_hash), _first)
        return found[0] if found else None

    def release(self, op: str, candidate: str) -> int:
        """Let a candidate be tested anew in every environment; how many were set aside is the answer.

        Variants of its code are set aside for themselves, as "triton: float16 ...".
        """
        sql = "DELETE FROM quarantine WHERE op = ? AND (candidate = ? OR instr(candidate, ?) = 1)"
        values = (op, candidate, f"{candidate}: ")
        return int(self._do(lambda connection: connection.execute(sql, values).rowcount, writes=True))

    def has_passed(self, op: str, candidate: str, environment: Environment, kernel_hash: str, dtype: str) -> bool:
        """Whether a self-test in this dtype was passed."""
        sql = f"SELECT 1 FROM self_tests WHERE {_OF_CANDIDATE} AND dtype = ?"
        return bool(self._ask(sql, (op, candidate, environment.key(), kernel_hash, dtype), _first))

    def passed(self, op: str, candidate: str, environment: Environment, kernel_hash: str, dtype: str) -> None:
        values = (op, candidate, environment.key(), kernel_hash, dtype, now())
        self._write("INSERT OR REPLACE INTO self_tests VALUES (?, ?, ?, ?, ?, ?)", [values])

    def begin_trial(self, op: str, candidate: str, environment: Environment, kernel_hash: str) -> int:
        """Note that this process runs a self-test now; how many processes died in the same one is the answer."""
        key = (op, candidate, environment.key(), kernel_hash)
        host, pid = socket.gethostname(), os.getpid()

        def note(connection: sqlite3.Connection) -> int:
            others = connection.execute(f"SELECT host, pid FROM trials WHERE {_OF_CANDIDATE}", key).fetchall()
            connection.execute("INSERT OR REPLACE INTO trials VALUES (?, ?, ?, ?, ?, ?, ?)", (*key, host, pid, now()))
            return sum(1 for at, number in others if at == host and not _lives(number))

        return int(self._do(note, writes=True))

    def end_trial(self, op: str, candidate: str, environment: Environment, kernel_hash: str) -> None:
        """It was lived through: neither this process nor those before it count any more."""
        key = (op, candidate, environment.key(), kernel_hash)
        self._write(f"DELETE FROM trials WHERE {_OF_CANDIDATE}", [key])

    def export_json(self, path: Path | str) -> int:
        """Measurements and what is set aside; how many of both is the answer. Self-tests hold for this card alone.

        Raises RocmSdError, and leaves a file that is there as it is, where the database could not be read.
        """
        entries, quarantined = self.all(), self.quarantined()
        lost = self.why_lost()
        if lost is not None:
            raise RocmSdError(
                f"The database {self.path} cannot be read: {lost}. Nothing was written to {path}.",
                hint="Close what else uses it, or install the rocm-sd that wrote it. A damaged one is kept beside it, "
                "with .aside- in its name; `rocm-sd tune --import FILE` takes an earlier export in again.",
            )
        return write_export(Path(path), entries, quarantined)

    def import_json(self, path: Path | str) -> int:
        """All that an export has, or an error and nothing of it; of the same key the newer measurement is kept."""
        found = read_export(Path(path))
        return self._add(found.measurements, found.quarantine)

    def merge(self, other: Database) -> int:
        """Add what the other one has, as if its export were imported."""
        return self._add(other.all(), other.quarantined())

    def close(self) -> None:
        with self._lock:
            if self._opened is not None and self._owner == os.getpid():
                self._opened.connection.close()
                self._opened = None

    def _add(self, entries: Iterable[Entry], quarantined: Iterable[Quarantined]) -> int:
        """All of both or none, and in the file: memory that ends with the process is not what was asked for."""
        measured, aside = [_put_row(entry) for entry in entries], [one.row() for one in quarantined]

        def add(connection: sqlite3.Connection) -> None:
            connection.executemany(_PUT, measured)
            connection.executemany(_QUARANTINE, aside)

        self._do(add, writes=True)
        why = self.why_not_kept()
        if why is not None:
            raise RocmSdError(
                f"{len(measured) + len(aside)} measurements were read, and none is kept: "
                f"{self.path} cannot be written ({why}).",
                hint="Close what else uses it and see that you may write it, then import again; or set ROCM_SD_CACHE "
                "to another folder.",
            )
        return len(measured) + len(aside)

    def _quarantine(self, quarantined: Iterable[Quarantined]) -> None:
        self._write(_QUARANTINE, [one.row() for one in quarantined])

    def _entries(self, where: str, values: tuple[Any, ...] | dict[str, Any]) -> tuple[Entry, ...]:
        return tuple(self._ask(f"SELECT {_COLUMNS} FROM measurements m WHERE {where}", values, Entry.from_row))

    def _ask(self, sql: str, values: tuple[Any, ...] | dict[str, Any], read: Callable[[Any], _Row]) -> list[_Row]:
        def ask(connection: sqlite3.Connection) -> list[_Row]:
            rows = connection.execute(sql, values).fetchall()
            try:
                return [read(row) for row in rows]
            except (ValueError, TypeError) as error:
                raise sqlite3.DatabaseError(f"a row that was never written so: {error}") from error

        found: list[_Row] = self._do(ask)
        return found

    def _write(self, sql: str, rows: list[tuple[Any, ...]]) -> None:
        self._do(lambda connection: connection.executemany(sql, rows), writes=True)

    def _do(self, what: Callable[[sqlite3.Connection], Any], *, writes: bool = False) -> Any:
        """On an open connection, as one transaction where it writes; where the file fails, on what takes its place."""
        with self._lock:
            while True:
                opened = self._open()
                try:
                    if not writes:
                        return what(opened.connection)
                    if opened.connection.in_transaction:
                        opened.connection.rollback()  # of reading: what is written is not held back by it
                    with opened.connection as connection:
                        # Before anything is read: of two writers that both read first, one could not go on.
                        connection.execute("BEGIN IMMEDIATE")
                        return what(connection)
                except DAMAGE as error:
                    in_memory = opened.why_not_kept is not None
                    if (in_memory and not opened.is_copy) or isinstance(error, _OUR_FAULT):
                        raise
                    self._give_up(opened, error)

    def _open(self) -> Opened:
        if self._opened is None or self._owner != os.getpid():
            if self._opened is not None:
                # SQLite forbids a child to use, or even to close, what its parent opened.
                self._of_parents.append(self._opened)
            self._opened, self._owner = open_file(self.path), os.getpid()
        self._lost = self._lost or self._opened.why_lost
        return self._opened

    def _give_up(self, opened: Opened, error: Exception) -> None:
        """A damaged file makes room for a new one. A full disk or a lock that is never let go: on without the file."""
        opened.connection.close()
        self._opened = None
        damaged = not isinstance(error, sqlite3.OperationalError) or _NO_TEXT in str(error)
        if damaged:
            self._lost = str(error)
        if opened.is_copy:
            # A copy in memory of a file that is damaged, and that cannot be renamed.
            self._opened = without_file(self.path, str(error), copied=False)
        elif not damaged or not set_aside(self.path, opened.identity, str(error)):
            self._opened = without_file(self.path, str(error), copied=not damaged)


def _put_row(entry: Entry) -> tuple[Any, ...]:
    """With the time that it is now: a row that is dated later, by a clock that was wrong, gives way."""
    return *entry.row(), now()


def _hashes(given: str | Collection[str]) -> tuple[str, ...]:
    return ("", given) if isinstance(given, str) else ("", *given)


def _marks(values: Collection[str]) -> str:
    return ", ".join("?" * len(values))


def _first(row: tuple[Any, ...]) -> Any:
    return row[0]


# SQLite keeps any bytes as text; to Python those that are no UTF-8 are an error of the operation.
_NO_TEXT = "Could not decode"
_OUR_FAULT = (sqlite3.ProgrammingError, sqlite3.IntegrityError, sqlite3.NotSupportedError)


def _lives(pid: int) -> bool:
    if os.name != "posix":
        return True  # asking would end it there; nothing is then held against a candidate
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
