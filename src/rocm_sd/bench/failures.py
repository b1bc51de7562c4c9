"""What ailed an engine, in the line that a table has for it."""

from __future__ import annotations

import re

from rocm_sd.engine import is_out_of_memory

__all__ = ["Failed", "told", "without_folders"]

_FOLDERS = re.compile(r"(?:[A-Za-z]:)?(?:[\\/][\w.~@+-]+)+[\\/](?=[\w.~@+-])")


class Failed(Exception):
    """Of one engine, in text: once it is handled, no frame of the error keeps the memory of the engine."""

    def __init__(self, engine: str, error: Exception) -> None:
        super().__init__(engine)
        self.engine, self.why, self.is_short_of_memory = engine, told(error), is_out_of_memory(error)


def told(error: Exception) -> str:
    """One line: what a user reads in a table. Folders are not named in a record."""
    lines = without_folders(str(error)).strip().splitlines()
    kind = "out of memory" if is_out_of_memory(error) else type(error).__name__
    return f"{kind}: {lines[0][:200]}" if lines else kind


def without_folders(text: str) -> str:
    return _FOLDERS.sub("", text)
