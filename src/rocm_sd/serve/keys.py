"""API keys: a file has a name and a hash a line, and a request's key is compared with all of them in constant time.

A key is 32 random bytes, which nobody finds by trying: one round of SHA-256 keeps it as well as many would.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from typing import TYPE_CHECKING

from rocm_sd.errors import InvalidOption, RocmSdError
from rocm_sd.files import write_text

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Keys", "add_key"]

_NAME = re.compile(r"[\w.-]{1,64}")
_LINE = re.compile(r"([\w.-]{1,64}):([0-9a-f]{64})")


class Keys:
    """Of a file; the names are those that logs show."""

    def __init__(self, file: Path) -> None:
        try:
            lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
        except (OSError, UnicodeDecodeError) as error:
            raise RocmSdError(
                f"The keys in {file} cannot be read ({error}).",
                hint=f"Type: rocm-sd serve --new-key NAME --keys {file}",
            ) from error
        found = [_LINE.fullmatch(line.strip()) for line in lines]
        if not lines or not all(found):
            raise RocmSdError(
                f"{file} is no file of keys: it takes a name, a colon and a hash in each line.",
                hint=f"Type: rocm-sd serve --new-key NAME --keys {file}",
            )
        self._hashes = [(match[1], match[2]) for match in found if match is not None]

    def name_of(self, key: str) -> str | None:
        """Whose it is; None of a key that is not known."""
        given, owner = _hash(key), None
        for name, known in self._hashes:
            if hmac.compare_digest(given, known):
                owner = name
        return owner


def add_key(file: Path, name: str) -> str:
    """A new key, which is shown once; its hash is added to the file, which nobody else can read."""
    if not _NAME.fullmatch(name):
        raise InvalidOption("--new-key", name, [], hint="A name has letters, digits, '.', '_' and '-', 64 at most.")
    before = file.read_text(encoding="utf-8") if file.exists() else "# Keys of rocm-sd serve: name:sha256\n"
    if any(line.startswith(f"{name}:") for line in before.splitlines()):
        raise InvalidOption("--new-key", name, [], hint=f"There is one of that name in {file}: remove its line first.")
    key = f"rsd-{secrets.token_urlsafe(32)}"
    write_text(file, f"{before.rstrip()}\n{name}:{_hash(key)}\n")
    # Nobody finds a key by its hash, but names are nobody's business either.
    file.chmod(0o600)
    return key


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
