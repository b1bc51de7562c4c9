"""Compiled code on disk: a file for each key, whole or not there at all."""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

from rocm_sd import settings
from rocm_sd.files import whole

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["folder", "read", "store"]


def folder() -> Path:
    """In the folder of ROCM_SD_CACHE, else of the system's caches."""
    chosen = settings.current().cache_dir or Path(platformdirs.user_cache_dir("rocm-sd", appauthor=False))
    return chosen / "code"


def store(entry: Path, body: Mapping[str, Any]) -> None:
    """A reader sees all of it or nothing."""
    packed = zlib.compress(json.dumps(body).encode())
    with whole(entry) as unfinished:
        unfinished.write_bytes(hashlib.sha256(packed).digest() + packed)


def read(entry: Path) -> dict[str, Any] | None:
    """The entry's content, or None where there is none or it is damaged; a damaged one is removed."""
    try:
        content = entry.read_bytes()
    except FileNotFoundError:
        return None
    digest, packed = content[:32], content[32:]
    if hashlib.sha256(packed).digest() != digest:
        entry.unlink(missing_ok=True)
        return None
    body: dict[str, Any] = json.loads(zlib.decompress(packed))
    return body
