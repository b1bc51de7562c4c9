"""Logs as lines of JSON, or as text: each with its time, its level and the facts that it is about."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone

__all__ = ["JsonLines", "TextLines", "log", "start"]

log = logging.getLogger("rocm-sd serve")

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _facts(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        said = {"time": when, "level": record.levelname.lower(), "event": record.getMessage(), **_facts(record)}
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)


class TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        facts = " ".join(f"{name}={value}" for name, value in _facts(record).items() if value not in {"", None})
        line = f"{when} {record.levelname.lower():7} {record.getMessage()} {facts}".rstrip()
        # A prompt, or a path, may have anything in it.
        line = line.encode("unicode_escape").decode() if not line.isprintable() else line
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def start(kind: str, level: str = "INFO") -> None:
    """Of this package, and of what is wrong in the HTTP server, on standard error; other loggers stay as they are."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if kind == "json" else TextLines())
    handler.addFilter(lambda record: "KeyboardInterrupt" not in record.getMessage())
    for logger, least in ((log, level), (logging.getLogger("uvicorn.error"), "WARNING")):
        logger.handlers[:] = [handler]
        logger.setLevel(least)
        logger.propagate = False
