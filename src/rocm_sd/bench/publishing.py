"""What every file that is given away has in common: the statement, the hash, and nothing personal in any text.

cleaned(values)           paths as their last part, and what names a person or this machine replaced
personal(values)          what still looks like a home folder or an e-mail address
names_of_this_machine()   what has the user's name or the host's: only the owner's machine can tell
digest(values)            SHA-256 of all but the hash itself
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import re
import socket
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocm_sd.errors import RocmSdError
from rocm_sd.plain_json import shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "NAME", "STATEMENT", "PersonalData", "cleaned", "digest", "names_of_this_machine", "personal", "point_in_time",
    "shortened_paths", "unprintable", "why_no_time",
]  # fmt: skip

STATEMENT = (
    "These figures are my own measurements, made with the command that is given here. "
    "I publish them under CC0 1.0: anyone may use them for anything."
)
# What a page shows: no character of it means anything to HTML, to Markdown or to a terminal.
NAME = {"pattern": r"^[A-Za-z0-9 .,:_+/()@\u00ae\u2122-]*$", "maxLength": 200}
# An error's text may have any characters but those that steer a terminal or turn the direction of what follows.
_STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_LONGEST = 10_000
# Clocks differ.
_AHEAD = timedelta(hours=1)

# A path that begins at a root, a drive or a home: only its last part is kept.
_PATH = re.compile(r"(?<![\w.:/\\-])(?:~|[A-Za-z]:(?=[/\\])|\\)?(?:[/\\][^\s/\\\"',;()=]+)+[/\\]?")
_HOMES = re.compile(r"(?:/home/|/Users/|/root\b|[A-Za-z]:\\Users\\|~/)")
# Where somebody's name is the next part, with all that leads there. It may have spaces where more parts follow.
_A_HOME = re.compile(
    r"(?:(?<!\w)[A-Za-z]:|(?:[/\\][^\s/\\\"',;()=]+)*?)?[/\\]+(?:home|Users)[/\\]+"
    r"(?:[^/\\\"',;()=\n]{1,60}(?=[/\\])|[^\s/\\\"',;()=]*)|/root\b|~(?=/)"
)
# Of a path in quotes no space is its end, and of one without the folders' names may have two.
_QUOTED_PATH = re.compile(r"(?P<quote>['\"])(?:~|[A-Za-z]:)?[/\\](?P<rest>[^'\"\n]*)(?P=quote)")
_SPACED_PATH = re.compile(
    _PATH.pattern.removesuffix(r"[/\\]?") + r"(?:(?: [^\s/\\\"',;()=:-][^\s/\\\"',;()=:]*){1,2}[/\\][^\s\"',;()=]*)+"
)
_MAIL = re.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+\.[\w.-]+")
# AMD's have 16 digits in a row, NVIDIA's are in groups.
_SERIAL = re.compile(r"GPU-[0-9a-fA-F]{8}[0-9a-fA-F-]*")
_OCTET = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
# An address in numbers, and a server that is no public site: with a password, with a port, or as urllib3 has it.
_HOST = re.compile(
    rf"(?<![\w.-])(?:{_OCTET}\.){{3}}{_OCTET}(?![\w.]*\d)(?::\d+)?"
    r"|(?<=://)(?:[^\s/\"'@]*@[^\s/\"']+|[^\s/\"':]+:\d+|\[[0-9a-fA-F:]+\](?::\d+)?)"
    r"|(?<=host=)(?P<mark>['\"])[^'\"]*(?P=mark)"
)
# Names that say nothing about anyone, and would be found everywhere.
_NOBODY = {
    "root", "user", "users", "admin", "ubuntu", "runner", "localhost", "docker", "amd", "nvidia", "rocm", "cuda",
    "linux", "python", "torch",
}  # fmt: skip
_HIDDEN = "(name)"


class PersonalData(RocmSdError):
    """Something in a record names a person, a host or a folder, and cannot be taken out without a guess."""

    def __init__(self, found: tuple[str, ...]) -> None:
        super().__init__(
            f"The record is not written for publication, because {'; '.join(found)}.",
            hint="Run the benchmark again with names that may be public (--model, --out), then --submit.",
        )
        self.found = found


def digest(values: dict[str, Any]) -> str:
    """Of the JSON with sorted keys and no spaces, without the hash itself."""
    hashed = {key: value for key, value in values.items() if key != "sha256"}
    canonical = json.dumps(hashed, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def shortened_paths(value: Any) -> Any:
    """Every path as its last part."""
    return _changed(value, _without_folders, keys=True)


def cleaned(value: Any) -> Any:
    """For what nobody would run again: whatever a text has of paths, people and this machine is taken out of it.

    Keys stay as they are: those are this project's own.
    """
    names = [re.compile(rf"(?<!\w){re.escape(name)}(?!\w)", re.IGNORECASE) for name in _own_names().values()]

    def change(text: str) -> str:
        text = _HOST.sub("(host)", _MAIL.sub("(mail)", _SERIAL.sub("GPU-(serial)", text)))
        text = _A_HOME.sub(lambda home: "" if text[home.end() : home.end() + 1] in ("/", "\\") else "(path)", text)
        text = _QUOTED_PATH.sub(lambda path: f"{path['quote']}{_last(path['rest'])}{path['quote']}", text)
        text = _without_folders(_SPACED_PATH.sub(lambda path: _last(path[0]), text))
        for name in names:
            text = name.sub(_HIDDEN, text)
        return _STEERS.sub(" ", text)

    return _changed(value, change, keys=False)


def _without_folders(text: str) -> str:
    return _PATH.sub(lambda path: _last(path[0]), text)


def _last(path: str) -> str:
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1] or "/"


def _changed(value: Any, change: Callable[[str], str], *, keys: bool) -> Any:
    if isinstance(value, dict):
        return {change(key) if keys else key: _changed(entry, change, keys=keys) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_changed(entry, change, keys=keys) for entry in value]
    return change(value) if isinstance(value, str) else value


def _texts(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, entry in value.items():
            yield f"a name in {where or 'the file'}", str(key)
            yield from _texts(entry, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list):
        for number, entry in enumerate(value):
            yield from _texts(entry, f"{where}[{number}]")
    elif isinstance(value, str):
        yield where, value


def personal(values: dict[str, Any]) -> tuple[str, ...]:
    """What looks like a home folder or an e-mail address, and where it stands."""
    found = []
    for where, text in _texts(values):
        if _HOMES.search(text):
            found.append(f"{shortened(where)} names a home folder")
        if _MAIL.search(text):
            found.append(f"{shortened(where)} has an e-mail address")
    return tuple(dict.fromkeys(found))


def unprintable(values: dict[str, Any]) -> Iterator[str]:
    for where, text in _texts(values):
        if len(text) > _LONGEST:
            yield f"{shortened(where)} is longer than {_LONGEST} characters"
        elif _STEERS.search(text):
            yield f"{shortened(where)} has characters that cannot be printed"


def names_of_this_machine(values: dict[str, Any]) -> tuple[str, ...]:
    """Only its owner's machine can tell its own names; a validator elsewhere cannot."""
    found = []
    for what, name in _own_names().items():
        whole = re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-])")
        found += [f"{where} has {what}" for where, text in _texts(values) if whole.search(text)]
    return tuple(dict.fromkeys(found))


def _own_names() -> dict[str, str]:
    """Those that would tell somebody something, the longest first."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):
        user = ""
    # Who types sudo, or is another user in a container, still has a name in the folder of their home.
    home = Path.home() if os.environ.get("HOME") else Path("/")
    host = socket.gethostname()
    names = {
        "the user's name": user,
        "the name of who typed sudo": os.environ.get("SUDO_USER", ""),
        "the name of a home folder": home.name if home.parent.name in ("home", "Users") else "",
        "the host's name": host,
        "the host's short name": host.split(".")[0],
    }
    telling = {what: name for what, name in names.items() if len(name) >= 3 and name.lower() not in _NOBODY}
    return dict(sorted(telling.items(), key=lambda each: -len(each[1])))


def point_in_time(text: str) -> datetime | None:
    try:
        # Before Python 3.11 the letter is not understood.
        found = datetime.fromisoformat(re.sub("Z$", "+00:00", text))
        return (found if found.tzinfo else found.replace(tzinfo=timezone.utc)).astimezone(timezone.utc)
    except (ValueError, OverflowError):
        return None


def why_no_time(text: str) -> str | None:
    """Why nothing can have been measured then."""
    when = point_in_time(text)
    if when is None:
        return f"there is no day {text}"
    return f"it was measured in the future, on {text}" if when > datetime.now(timezone.utc) + _AHEAD else None
