"""Files on a user's disk: what may not be there is read, and what is written is there whole or not at all."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rocm_sd.errors import FULL, NoDiskSpace

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["alone", "is_special", "read_text", "text_of", "told_when_full", "whole", "write_text", "write_texts"]

log = logging.getLogger("rocm_sd")
# A million prompts, or kernels of a profile by the hundred thousand.
MOST_TEXT = 128 * 2**20


def read_text(path: Path) -> str:
    """Its text without the white space around it; "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def text_of(path: Path, unreadable: Callable[[str], Exception], *, most: int = MOST_TEXT) -> str:
    """The whole text of a file that a user names; where it cannot be had, `unreadable` makes the error of the reason.

    A device has no end: no more than `most` bytes are read of anything.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(most + 1)
        if len(raw) > most:
            raise unreadable(f"it is larger than {most / 2**20:.0f} MiB")
        return raw.decode("utf-8-sig")
    except FileNotFoundError:
        raise unreadable("there is no such file") from None
    except OSError as error:
        raise unreadable(error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise unreadable(f"byte {error.start} is no UTF-8") from None
    except ValueError as error:
        # A path with a null byte.
        raise unreadable(str(error)) from error


def is_special(path: Path) -> bool:
    """Whether there is something at `path` that is neither a file nor a folder: a FIFO, a device, a terminal."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


@contextmanager
def told_when_full(path: Path | str) -> Iterator[None]:
    """A full disk, or a quota that is used up, as NoDiskSpace of `path`."""
    try:
        yield
    except Exception as error:
        # A library in another language has the system's error as text alone.
        if getattr(error, "errno", None) in FULL or any(os.strerror(code) in str(error) for code in FULL):
            raise NoDiskSpace(path) from error
        raise


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes `path` when all went well, and is gone otherwise; its folder is made.

    Links are followed: what they lead to is written, and they stay. What is no regular file (a FIFO, a device) is
    written into when all went well, and stays, too.
    """
    special = is_special(path)
    with told_when_full(path):
        target = path if special else Path(os.path.realpath(path))
        if not special:
            target.parent.mkdir(parents=True, exist_ok=True)
        # The beginning of the name is enough: with more added to it a long one would be too long.
        handle, name = tempfile.mkstemp(dir=None if special else target.parent, prefix=f".{target.name[:60]}.")
        os.close(handle)
        unfinished = Path(name)
        try:
            yield unfinished
            if special:
                with unfinished.open("rb") as made, os.fdopen(os.open(path, os.O_WRONLY), "wb") as opened:
                    shutil.copyfileobj(made, opened)
            else:
                # Temporary files are their owner's alone; what is written here is for everyone, unless it was not.
                unfinished.chmod(stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o644)
                unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """A reader, or a program that is killed, never sees half of it."""
    with whole(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="\n")


def write_texts(folder: Path, texts: Mapping[Path, str]) -> None:
    """Files that belong together, by their paths in the folder: where one cannot be written, no new one is left."""
    new = []
    try:
        for path, text in texts.items():
            if not (folder / path).exists():
                new.append(folder / path)
            write_text(folder / path, text)
    except BaseException:
        for path in new:
            path.unlink(missing_ok=True)
        raise


@contextmanager
def alone(file: Path, in_use: Callable[[Path], Exception]) -> Iterator[None]:
    """One process at a time writes `file`: another gets the error that `in_use` makes.

    By a file beside it, which the system lets go of where a process is killed.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    path = file.with_name(f".{file.name}.lock")
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not _locked(lock):
                raise in_use(file)
            # Who had it before may have removed it between the two.
            if _same_file(lock, path):
                try:
                    yield
                finally:
                    with suppress(OSError):
                        path.unlink()
                return
        finally:
            os.close(lock)


def _locked(lock: int) -> bool:
    if fcntl is not None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            log.warning("this file system has no locks (%s): run one benchmark at a time", error.strerror)
    return True


def _same_file(lock: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), path.stat())
    except OSError:
        return False
