"""Files on a user's disk: what may not be there is read, and what is written is there whole or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rocm_sd.errors import NoDiskSpace

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["read_text", "whole", "write_text"]


def read_text(path: Path) -> str:
    """Its text without the white space around it; "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes `path` when all went well, and is gone otherwise; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    unfinished = Path(name)
    try:
        yield unfinished
        # Temporary files are their owner's alone; what is written here is for everyone.
        unfinished.chmod(0o644)
        unfinished.replace(path)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise NoDiskSpace(path) from error
        raise
    finally:
        unfinished.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """A reader, or a program that is killed, never sees half of it."""
    with whole(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="\n")
