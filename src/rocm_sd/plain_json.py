"""JSON that anyone may have written, as plain values; or one sentence that says why it is not taken.

    read_json(path, unreadable)     what a file holds, or the error that `unreadable` makes of the reason
    parsed(text)                    the same of a text; raises NotPlain

Every file that a user or a stranger hands over comes through here. What comes out is safe to walk, to compare, to print
and to store: it is not deep, its text can be encoded, its numbers are finite and fit into 64 bits.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["MOST_BYTES", "NotPlain", "parsed", "read_json", "shortened"]

# The largest file under benchmarks/ has half a megabyte, and an export 700 bytes a measurement. Parsed, JSON takes up
# to twenty times as much.
MOST_BYTES = 128 * 2**20
# Records nest five levels deep. Python's own stack ends at a thousand.
_MOST_DEEP = 64
# A handle of a driver has 64 bits; more is no quantity, and neither SQLite nor a float takes it.
_LEAST, _MOST = -(2**63), 2**64 - 1
_NAMES = {dict: "an object", list: "a list", str: "text", bool: "true or false"}


class NotPlain(ValueError):
    """Bytes that are no JSON, or JSON that no program of this project wrote; its text is the reason."""


def read_json(
    path: Path,
    unreadable: Callable[[str], Exception],
    *,
    of: type = object,
    finite: bool = True,
    most: int = MOST_BYTES,
) -> Any:
    """What a file holds; where it cannot be read, `unreadable` makes the error of the reason.

    `of` is what it must hold, such as dict.
    """
    try:
        with path.open("rb") as file:
            # One byte more than allowed, whatever the file says of its size: a device says nothing.
            found = parsed(file.read(most + 1), finite=finite, most=most)
    except FileNotFoundError:
        raise unreadable("there is no such file") from None
    except OSError as error:
        raise unreadable(error.strerror or str(error)) from error
    except ValueError as error:
        # A path with a null byte is one, too.
        raise unreadable(str(error)) from error
    if not isinstance(found, of):
        raise unreadable(f"it is not {_NAMES[of]}, but {_NAMES.get(type(found), 'a number or null')}")
    return found


def parsed(raw: bytes | str, *, finite: bool = True, most: int = MOST_BYTES) -> Any:
    """`finite`: NaN and infinity are refused; without it they stay, as in the configs of some models."""
    if len(raw) > most:
        raise NotPlain(f"it is larger than {most / 2**20:.0f} MiB")
    try:
        text = raw if isinstance(raw, str) else raw.decode("utf-8")
        values = json.loads(text, parse_constant=_no_number if finite else None)
    except RecursionError:
        raise NotPlain(f"it is nested more than {_MOST_DEEP} levels deep") from None
    except MemoryError:
        raise NotPlain("there is too little memory to read it") from None
    except UnicodeDecodeError as error:
        raise NotPlain(f"byte {error.start} is no UTF-8") from None
    except NotPlain:
        raise
    except ValueError as error:
        raise NotPlain(_reason(error)) from None
    _require_plain(values, finite=finite)
    return values


def shortened(text: str, most: int = 80) -> str:
    """For a sentence: a stranger's text may be as long as a file."""
    return text if len(text) <= most else f"{text[:most]}..."


def _no_number(name: str) -> NoReturn:
    raise NotPlain(f"it has {name}, which is no number")


def _reason(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"it is no JSON: {error}"
    # Python's own limit on the digits of an integer, whose sentence speaks of Python.
    return "it has a number of thousands of digits"


def _require_plain(values: Any, *, finite: bool) -> None:
    """Level by level, with no stack: what is too deep for one is what is looked for."""
    level = [values]
    for _ in range(_MOST_DEEP):
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                below += each
                below += each.values()
            elif isinstance(each, list):
                below += each
            elif isinstance(each, str):
                _require_text(each)
            elif isinstance(each, float):
                if finite and not math.isfinite(each):
                    raise NotPlain("it has a number beyond all floats")
            elif isinstance(each, int) and not _LEAST <= each <= _MOST:
                raise NotPlain(f"it has a number of {_digits(each)} digits")
        if not below:
            return
        level = below
    raise NotPlain(f"it is nested more than {_MOST_DEEP} levels deep")


def _digits(number: int) -> int:
    return math.ceil(number.bit_length() * math.log10(2))


def _require_text(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise NotPlain("it has half of a surrogate pair, which is no character") from None
