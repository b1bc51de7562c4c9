"""A unit of a contribution, tried: what it finds, or what it raises as a failure that can be sent.

    found = attempt(folder, seconds, "conv2d triton", judge, "conv2d", "triton")

What it runs may ask `seconds_left()` and call `progress(share, what)`. Warnings go along with what it finds. What is
measured is kept apart from what the user has measured before: all of it is found anew.
"""

from __future__ import annotations

import json
import logging
import os
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocm_sd.bench.card_report import FAILED, PASSED, Item
from rocm_sd.contribution.keeping import Found
from rocm_sd.errors import RocmSdError, first_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_sd.comparison import Comparison

__all__ = [
    "OUT_OF_TIME", "PROGRESS", "attempt", "called", "compared_item", "failed", "folder", "named", "progress",
    "seconds_left", "warnings",
]  # fmt: skip

PROGRESS = "progress.json"
# How the reason of a unit begins that may be tried again with more of it.
OUT_OF_TIME = "the time was over"
_SAID_EVERY_S = 0.2
_MOST_LINES, _LONGEST_LINE = 24, 500
_log = logging.getLogger("rocm_sd")
_now: dict[str, Any] = {"folder": None, "end": float("inf"), "said": 0.0, "heard": None}


def attempt(place: str, seconds: float, name: str, work: Callable[..., Found] | str, *arguments: Any) -> Found:
    """What work(*arguments) finds; what it raises is a failure of the unit `name`, with the lines that led there."""
    heard = _Heard()
    _now.update(folder=Path(place), end=time.monotonic() + seconds, said=0.0, heard=heard)
    before = os.environ.get("ROCM_SD_CACHE")
    os.environ["ROCM_SD_CACHE"] = str(Path(place) / "cache")
    _log.addHandler(heard)
    try:
        found = named(work)(*arguments) if isinstance(work, str) else work(*arguments)
    except Exception as error:  # noqa: BLE001 -- whatever fails is what is to be found out
        lines = traceback.format_exc().strip().splitlines()[-_MOST_LINES:]
        found = failed(name, _reason(error), {"tracebacks": {name: lines}})
    finally:
        _log.removeHandler(heard)
        if before is None:
            os.environ.pop("ROCM_SD_CACHE", None)
        else:
            os.environ["ROCM_SD_CACHE"] = before
    said = {"warnings": {name: heard.lines}} if heard.lines else {}
    return replace(found, data={**said, **found.data})


def named(text: str) -> Callable[..., Any]:
    """A function by "module:function", imported now."""
    module, _, name = text.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


def called(text: str, *arguments: Any) -> Any:
    """For a worker, so that who asks it need not import what it runs."""
    return named(text)(*arguments)


class _Heard(logging.Handler):
    """The first warnings of this project, each once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()[:_LONGEST_LINE]
        if line not in self.lines and len(self.lines) < _MOST_LINES:
            self.lines.append(line)


def warnings() -> list[str]:
    """Of the unit that is tried now."""
    return list(_now["heard"].lines)


def failed(name: str, why: str, data: dict[str, Any] | None = None) -> Found:
    return Found((Item(name, FAILED, why),), data=data or {})


def compared_item(name: str, before: str, compared: Comparison, figures: dict[str, float | str]) -> Item:
    """Of what was timed beside stock: nothing may be slower than it."""
    bounds = f"{compared.low:.2f} to {compared.high:.2f}"
    words = f"{compared.ratio:.2f} times as fast as stock ({bounds})"
    if compared.verdict == "no difference":
        words = f"no difference from stock ({bounds} times as fast)"
    known = {**figures, "ratio": compared.ratio, "low": compared.low, "high": compared.high}
    return Item(name, FAILED if compared.verdict == "slower" else PASSED, f"{before}{words}", figures=known)


def _reason(error: Exception) -> str:
    if isinstance(error, RocmSdError):
        return error.message
    kind = type(error).__name__
    short_of_memory = isinstance(error, MemoryError) or kind == "OutOfMemoryError" or "allocate memory" in str(error)
    return f"{'out of memory' if short_of_memory else kind}: {first_line(error)}"


def folder(name: str) -> Path:
    """Where a unit keeps what it will need when it is tried again."""
    made: Path = _now["folder"] / name
    made.mkdir(parents=True, exist_ok=True)
    return made


def seconds_left() -> float:
    return float(_now["end"] - time.monotonic())


def progress(share: float, what: str) -> None:
    """Written to a file: whoever waits for the unit looks into it."""
    if time.monotonic() - _now["said"] >= _SAID_EVERY_S:
        _now["said"] = time.monotonic()
        with suppress(OSError):
            (_now["folder"] / PROGRESS).write_text(json.dumps([share, what]), encoding="utf-8")
