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
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["entry", "folder", "kept", "read", "store"]


def folder() -> Path:
    """In the folder of ROCM_SD_CACHE, else of the system's caches."""
    chosen = settings.current().cache_dir or Path(platformdirs.user_cache_dir("rocm-sd", appauthor=False))
    return chosen / "code"


def entry(parts: Iterable[bytes | str], *, inside: str = "", of: Path | None = None) -> Path:
    """The file of what these parts decide, `inside` a folder of the cache, or of another cache."""
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        # The length in front: without it a boundary could move, and two calls share one key.
        digest.update(len(raw).to_bytes(8, "little") + raw)
    key = digest.hexdigest()
    return (of or folder()) / inside / key[:2] / f"{key}.json.z"


def kept(entry: Path, make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """The entry's content, which is made where there is none."""
    body = read(entry)
    if body is None:
        body = dict(make())
        store(entry, body)
    return body


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
