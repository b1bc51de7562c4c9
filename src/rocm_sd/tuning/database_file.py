"""The file of a performance database: made whole or not at all, checked before it is trusted, never lost."""

from __future__ import annotations

import logging
import os
import sqlite3
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from typing import TYPE_CHECKING

from rocm_sd.tuning.environment import Environment

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["DAMAGE", "Opened", "open_file", "set_aside", "without_file"]

log = logging.getLogger("rocm_sd")

APPLICATION = 0x726F636D  # "rocm": what tells this project's files from any other SQLite file
VERSION = 1
BUSY_S = 5.0
# SQLite names what is damaged in its own words, and those may be damaged, too.
DAMAGE = (sqlite3.DatabaseError, UnicodeDecodeError)
_SCHEMA = """
CREATE TABLE measurements (
    op TEXT NOT NULL, problem TEXT NOT NULL, environment TEXT NOT NULL, kernel_hash TEXT NOT NULL,
    candidate TEXT NOT NULL, config TEXT NOT NULL,
    median_us REAL, low_us REAL, high_us REAL, stock_us REAL, numerics TEXT NOT NULL, taken TEXT NOT NULL,
    PRIMARY KEY (op, problem, environment, kernel_hash, candidate, config)) WITHOUT ROWID;
CREATE TABLE quarantine (
    op TEXT NOT NULL, candidate TEXT NOT NULL, environment TEXT NOT NULL, kernel_hash TEXT NOT NULL,
    reason TEXT NOT NULL, taken TEXT NOT NULL,
    PRIMARY KEY (op, candidate, environment, kernel_hash)) WITHOUT ROWID;
CREATE TABLE self_tests (
    op TEXT NOT NULL, candidate TEXT NOT NULL, environment TEXT NOT NULL, kernel_hash TEXT NOT NULL,
    dtype TEXT NOT NULL, taken TEXT NOT NULL,
    PRIMARY KEY (op, candidate, environment, kernel_hash, dtype)) WITHOUT ROWID;
CREATE TABLE trials (
    op TEXT NOT NULL, candidate TEXT NOT NULL, environment TEXT NOT NULL, kernel_hash TEXT NOT NULL,
    host TEXT NOT NULL, pid INTEGER NOT NULL, taken TEXT NOT NULL,
    PRIMARY KEY (op, candidate, environment, kernel_hash, host, pid)) WITHOUT ROWID;
"""
_TABLES = {"measurements", "quarantine", "self_tests", "trials"}


class _Later(Exception):
    """No fault of the file: a later rocm-sd wrote it."""


class _Foreign(sqlite3.DatabaseError):
    """A database, and not this project's."""


@dataclass(frozen=True)
class Opened:
    """`identity` tells a file from another that later has its name; `why_not_kept`: writes end with the process.

    `why_lost`: a file was there, and what it holds could not be read. `is_copy`: it is in memory, as the file was.
    """

    connection: sqlite3.Connection
    identity: tuple[int, int] | None
    why_not_kept: str | None = None
    why_lost: str | None = None
    is_copy: bool = False


def open_file(path: Path) -> Opened:
    """Made where there is none. What cannot be used is one warning; a connection comes back in every case."""
    why = "it is replaced again and again"
    lost = None
    for _ in range(3):
        identity = None
        try:
            if not path.exists():
                _create(path)
            identity = _identity(path)
            return Opened(_renewed(_checked(_connect(path))), identity, why_lost=lost)
        except _Later as later:
            why = str(later)
            break
        except (sqlite3.OperationalError, OSError) as error:
            why = str(error)
            break
        except DAMAGE as error:
            why = lost = str(error)
            if not set_aside(path, identity, why):
                break
    return without_file(path, why)


def without_file(path: Path, why: str, *, copied: bool = True) -> Opened:
    """Make a database in memory, with what can be read of the file; without it where its copy proved damaged."""
    _say_once(f"{path} is not written to, and what is measured lasts as long as this process: {why}.")
    memory = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    # In a folder that cannot be written, SQLite reads a file only where it knows that nobody changes it.
    for way in ("mode=ro", "mode=ro&immutable=1") if copied else ():
        with suppress(sqlite3.Error, UnicodeDecodeError, OSError, _Later):
            source = _checked(sqlite3.connect(f"{path.absolute().as_uri()}?{way}", uri=True, timeout=BUSY_S))
            try:
                source.backup(memory)
                return Opened(_renewed(_checked(memory)), None, why, is_copy=True)
            finally:
                source.close()
    memory.close()
    memory = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    memory.executescript(_SCHEMA)
    return Opened(memory, None, why, why_lost=why if _may_exist(path) else None)


def set_aside(path: Path, identity: tuple[int, int] | None, why: str) -> bool:
    """Rename a file that cannot be trusted; whether its name is free now, or another process saw to that before."""
    if identity is None or _identity(path) != identity:
        return True
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S")
    target = path.with_name(f"{path.name}.aside-{stamp}-{os.getpid()}")
    try:
        # First what SQLite would otherwise play back into the next file of this name.
        for tail in ("-wal", "-shm", ""):
            with suppress(FileNotFoundError):
                path.with_name(path.name + tail).rename(target.with_name(target.name + tail))
    except OSError as error:
        _say_once(f"{path} cannot be used ({why}), nor be renamed ({error}).")
        return False
    log.warning("%s cannot be used (%s). It is kept as %s, and a new one is made.", path, why, target.name)
    return True


def _create(path: Path) -> None:
    """Make the file under another name, and rename it in one step: no process ever sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new-{os.getpid()}")
    new.unlink(missing_ok=True)
    try:
        connection = _connect(new)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(
                f"BEGIN; {_SCHEMA} PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {VERSION}; COMMIT;"
            )
        finally:
            connection.close()
        try:
            os.link(new, path)
        except FileExistsError:
            return  # another process was sooner
        except OSError:
            # A file system without hard links; the gap in which two processes could both rename is small.
            if not path.exists():
                new.rename(path)
    finally:
        for tail in ("", "-wal", "-shm"):
            new.with_name(new.name + tail).unlink(missing_ok=True)


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    # In WAL mode a commit outlasts the death of a process, and the file stays whole where the power fails.
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


def _checked(connection: sqlite3.Connection) -> sqlite3.Connection:
    """The connection, or, after it is closed, an error that says what is wrong with the file."""
    try:
        _check(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _check(connection: sqlite3.Connection) -> None:
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if application != APPLICATION:
        raise _Foreign("it is not a database of rocm-sd")
    if version > VERSION:
        raise _Later(f"a later rocm-sd wrote it, in version {version} of its form; this one reads {VERSION}")
    if version != VERSION or not tables >= _TABLES:
        raise _Foreign("its tables are not those of a database of rocm-sd")


def _renewed(connection: sqlite3.Connection) -> sqlite3.Connection:
    """The connection, after rows of environments that are written in another way now have today's key.

    Of two rows that become one, the newer is kept. A file that is busy or cannot be written is left for the next time.
    """
    with suppress(sqlite3.OperationalError):
        for table, columns in _keyed_tables(connection):
            rows = connection.execute(f"SELECT DISTINCT environment FROM {table}").fetchall()  # noqa: S608 -- of the schema
            renamed = [(old, new) for (old,) in rows if (new := _todays(old)) != old]
            if renamed:
                with connection:
                    connection.execute("BEGIN IMMEDIATE")
                    _rename(connection, table, columns, renamed)
    return connection


def _keyed_tables(connection: sqlite3.Connection) -> list[tuple[str, list[str]]]:
    """Each table that has an environment in its key, with the rest of that key."""
    found = []
    for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        keys = [row[1] for row in connection.execute(f"PRAGMA table_info({table})") if row[5]]
        if "environment" in keys:
            found.append((table, [name for name in keys if name != "environment"]))
    return found


def _todays(key: str) -> str:
    try:
        return Environment.from_key(key).key()
    except (ValueError, TypeError):
        return key  # not of this project, or of a later form: not to be touched


def _rename(connection: sqlite3.Connection, table: str, columns: list[str], renamed: list[tuple[str, str]]) -> None:
    same = " AND ".join(f"n.{name} = {table}.{name}" for name in columns)
    for old, new in renamed:
        connection.execute(
            f"""DELETE FROM {table} WHERE environment = ? AND EXISTS
            (SELECT 1 FROM {table} n WHERE n.environment = ? AND {same} AND n.taken >= {table}.taken)""",  # noqa: S608
            (old, new),
        )
        connection.execute(f"UPDATE OR REPLACE {table} SET environment = ? WHERE environment = ?", (new, old))  # noqa: S608


def _may_exist(path: Path) -> bool:
    """A folder that may not be looked into may have one."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


@cache
def _say_once(sentence: str) -> None:
    log.warning(sentence)
