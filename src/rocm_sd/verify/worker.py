"""One worker process: reads a request a line, calls the function it names, answers a line. See `workers`."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any

from rocm_sd.errors import RocmSdError

__all__ = ["main"]


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    for place in request["path"]:
        if place not in sys.path:
            sys.path.append(place)
    for name in [name for name in os.environ if name.startswith("ROCM_SD_")]:
        del os.environ[name]
    os.environ.update(request["environment"])
    module, function = request["function"].split(":")
    try:
        return {"value": getattr(importlib.import_module(module), function)(**request["arguments"])}
    except RocmSdError as error:
        return {"error": _told(error, error.message, error.hint)}
    except Exception as error:  # noqa: BLE001 -- whatever a compiler raises is the answer, and the worker lives on
        traceback.print_exc()
        return {"error": _told(error, f"{type(error).__name__}: {error}", None)}


def _told(error: Exception, message: str, hint: str | None) -> dict[str, Any]:
    kind = type(error)
    return {
        "module": kind.__module__,
        "class": kind.__qualname__,
        "ours": isinstance(error, RocmSdError),
        "message": message,
        "hint": hint,
    }


def main() -> None:
    # Compilers write to standard output from C++; answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
