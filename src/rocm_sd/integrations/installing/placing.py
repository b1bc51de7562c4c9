"""Put a folder into a host and take it out again, by a list of what was written.

The list lies beside the folder and is written first: a broken-off installation can be removed like a whole one. What
the user changed is kept, by its hash.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path, PurePosixPath, PureWindowsPath

import rocm_sd
from rocm_sd.errors import FULL, NoDiskSpace, RocmSdError
from rocm_sd.files import whole, write_text
from rocm_sd.integrations.installing.hosts import Host, NotAHost
from rocm_sd.plain_json import read_json
from rocm_sd.typed_json import Misfit, Rules, read

__all__ = ["LIST_NAME", "Placed", "Removed", "place", "remove"]

LIST_NAME = ".rocm-sd-install.json"
_ELSEWHERE = "elsewhere"
# A name with a null byte is no name of a file.
_TEXT = {"pattern": r"^[^\u0000]*$"}
_RULES: Rules = {
    "_Record.mode": {"enum": ["link", "copy"]},
    **{f"_Record.{name}": _TEXT for name in ("folder", "target")},
    "_Record.files": {"propertyNames": {**_TEXT, "maxLength": 1000}},
}
_IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc")


@dataclass(frozen=True)
class Placed:
    """`mode` is link or copy; `kept` are files that the user had changed, and that stay as they are."""

    destination: Path
    mode: str
    files: int
    kept: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Removed:
    files: tuple[Path, ...] = ()
    kept: tuple[Path, ...] = ()


@dataclass
class _Record:
    """What was written at `folder`: a link to `target`, or `files` with their hashes."""

    folder: str
    mode: str
    version: str
    target: str | None = None
    files: dict[str, str] = field(default_factory=dict)


def place(host: Host, *, copy: bool = False) -> Placed:
    """Link `host.source` to `host.destination`, or copy it where links cannot be made or `copy` asks for it."""
    if not host.source.is_dir():
        raise RocmSdError(
            f"This rocm-sd has no part for {host.title}: {host.source} is missing.",
            hint="Type: pip install --force-reinstall rocm-sd",
        )
    before = _read_record(host)
    occupied = host.destination.exists() or host.destination.is_symlink()
    if occupied and not _is_ours(host, before):
        raise RocmSdError(
            f"{host.destination} is there already, and rocm-sd did not write it.",
            hint="Move it away, and install again.",
        )
    try:
        host.destination.parent.mkdir(parents=True, exist_ok=True)
        if copy or (occupied and not host.destination.is_symlink()):
            return _copied(host, before)
        return _linked(host, before)
    except OSError as error:
        if error.errno in FULL:
            raise NoDiskSpace(host.destination) from error
        raise RocmSdError(
            f"{host.destination} cannot be written ({error.strerror or error}).",
            hint="Check whose folder it is, and run this as its owner.",
        ) from error


def _is_ours(host: Host, record: _Record | None) -> bool:
    if record is None:
        return False
    if record.mode == "link":
        return host.destination.is_symlink() and str(host.destination.readlink()) == record.target
    return not host.destination.is_symlink()


def remove(host: Host) -> Removed:
    """Remove what the list says and nothing else; what was changed since stays."""
    record = _read_record(host)
    if record is None:
        raise NotAHost(
            f"rocm-sd is not installed in {host.root}: there is no {host.destination.parent / LIST_NAME}.",
            hint=f"To install it, type: rocm-sd install {host.kind} {host.root}",
        )
    try:
        gone, kept = _take_link(host, record) if record.mode == "link" else _take_files(host, record)
        (host.destination.parent / LIST_NAME).unlink(missing_ok=True)
    except OSError as error:
        raise RocmSdError(
            f"{error.filename or host.destination} cannot be removed ({error.strerror or error}).",
            hint="Check whose folder it is, and run this as its owner. What is left is still in the list.",
        ) from error
    return Removed(tuple(gone), tuple(kept))


def _linked(host: Host, before: _Record | None) -> Placed:
    target = host.source.resolve()
    record = _Record(host.destination.name, "link", rocm_sd.__version__, str(target))
    _write_record(host, record)
    # A new link takes the old one's place in one step: the host never finds nothing there.
    name = host.destination.with_name(f".{host.destination.name}.{os.getpid()}")
    try:
        name.symlink_to(target, target_is_directory=True)
        name.replace(host.destination)
    except (OSError, NotImplementedError) as error:
        name.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in {*FULL, errno.EACCES, errno.EROFS}:
            _restore_record(host, before)
            raise
        note = f"A link could not be made here ({error}): copied. After an update of rocm-sd, install again."
        return replace(_copied(host, before), notes=(note,))
    return Placed(host.destination, "link", 1)


def _copied(host: Host, before: _Record | None) -> Placed:
    if host.destination.is_symlink():
        host.destination.unlink()
    sources = {file.relative_to(host.source).as_posix(): file for file in _files(host.source)}
    old = before.files if before else {}
    kept = [name for name in sources if _changed(host, name, old.get(name), sources[name])]
    # A file that an earlier version had and this one has not goes, unless the user changed it.
    stale = [name for name in old if name not in sources and _present(host, name) == old[name]]
    hashes = {name: _hash(file) or "" for name, file in sources.items() if name not in kept}
    record = _Record(
        host.destination.name, "copy", rocm_sd.__version__, None, hashes | {name: old[name] for name in stale}
    )
    _write_record(host, record)
    if host.destination.exists():
        for name in hashes:
            with whole(host.destination / name) as unfinished:
                shutil.copyfile(sources[name], unfinished)
        for name in stale:
            (host.destination / name).unlink()
        _write_record(host, replace(record, files=hashes))
    else:
        _copy_whole(host)
    return Placed(host.destination, "copy", len(hashes), tuple(host.destination / name for name in kept))


def _copy_whole(host: Host) -> None:
    """All files or none: copied beside, then renamed."""
    unfinished = Path(tempfile.mkdtemp(dir=host.destination.parent, prefix=f".{host.destination.name}."))
    try:
        shutil.copytree(host.source, unfinished, dirs_exist_ok=True, ignore=_IGNORED)
        unfinished.chmod(0o755)
        unfinished.rename(host.destination)
    finally:
        if unfinished.exists():
            shutil.rmtree(unfinished)


def _changed(host: Host, name: str, written: str | None, source: Path) -> bool:
    """Is there a file that is neither what was written before nor what is to be written now?"""
    present = _present(host, name)
    return present is not None and present not in {written, _hash(source)}


def _present(host: Host, name: str) -> str | None:
    """The hash of the file of that name in the folder; what is a link, or lies behind one, has no hash of ours.

    A subfolder may have become a link to somewhere else: what is there was not written by rocm-sd, and is not touched.
    """
    file = host.destination / name
    folder = Path(os.path.realpath(host.destination.parent)) / host.destination.name
    if file.is_symlink() or not Path(os.path.realpath(file.parent)).is_relative_to(folder):
        return _ELSEWHERE
    return _hash(file)


def _take_link(host: Host, record: _Record) -> tuple[list[Path], list[Path]]:
    if _is_ours(host, record):
        host.destination.unlink()
        return [host.destination], []
    # Broken off before the link was made, or replaced by the user's own.
    return [], [host.destination] if host.destination.exists() or host.destination.is_symlink() else []


def _take_files(host: Host, record: _Record) -> tuple[list[Path], list[Path]]:
    gone, kept = [], []
    for name, written in record.files.items():
        file = host.destination / name
        present = _present(host, name)
        if present == written and present != _ELSEWHERE:
            file.unlink()
            gone.append(file)
            compiled = file.parent / "__pycache__"
            for code in () if compiled.is_symlink() else compiled.glob(f"{file.stem}.*.pyc"):
                code.unlink()
        elif present is not None and os.path.lexists(file):
            kept.append(file)
    if host.destination.is_dir() and not host.destination.is_symlink():
        for folder, _, _ in sorted(os.walk(host.destination), reverse=True):
            if not any(Path(folder).iterdir()):
                Path(folder).rmdir()
        if host.destination.exists():
            kept += [file for file in _files(host.destination) if file not in kept]
    return gone, kept


def _files(folder: Path) -> list[Path]:
    return sorted(
        file
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".pyc"
    )


def _hash(file: Path) -> str | None:
    return sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def _read_record(host: Host) -> _Record | None:
    file = host.destination.parent / LIST_NAME

    def unreadable(why: str) -> RocmSdError:
        return RocmSdError(
            f"{file} cannot be read ({why}): what rocm-sd wrote is not known.",
            hint=f"Look into {host.destination}, remove both by hand, and install again.",
        )

    if not os.path.lexists(file):
        return None
    try:
        record = read(_Record, read_json(file, unreadable), _RULES)
    except Misfit as error:
        raise unreadable(str(error)) from None
    # The list names files to write and to delete: none may lie outside the folder.
    if record.folder != host.destination.name or not all(map(_is_inside, record.files)):
        raise RocmSdError(f"{file} is not a list that rocm-sd wrote.", hint="Remove it by hand.")
    return record


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    named = bool(path.parts) and ".." not in path.parts and not path.is_absolute()
    # On Windows a drive, and a path with the other slash, lead outside as well.
    return named and not PureWindowsPath(name).anchor and ".." not in PureWindowsPath(name).parts


def _write_record(host: Host, record: _Record) -> None:
    write_text(host.destination.parent / LIST_NAME, json.dumps(vars(record), indent=1) + "\n")


def _restore_record(host: Host, before: _Record | None) -> None:
    if before is None:
        (host.destination.parent / LIST_NAME).unlink(missing_ok=True)
    else:
        _write_record(host, before)
