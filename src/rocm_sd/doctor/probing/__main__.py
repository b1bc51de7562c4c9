"""Runs one probe and prints its answer as one JSON object; whatever else is printed, by any library, goes to stderr."""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from typing import Any

from rocm_sd.doctor.check import CannotRun
from rocm_sd.doctor.examination import all_probes

__all__ = ["ask", "main"]


def ask(name: str, text: str) -> dict[str, Any]:
    """The answer of the probe to arguments given as JSON, or {"cannot": reason}."""
    try:
        return _answer(name, text)
    except CannotRun as reason:
        return {"cannot": str(reason)}
    except Exception as error:  # noqa: BLE001 -- whatever went wrong is what the user must see
        traceback.print_exc()
        return {"cannot": f"the probe failed with {type(error).__name__}: {error}"}


def _answer(name: str, text: str) -> dict[str, Any]:
    probes = all_probes()
    if name not in probes:
        raise CannotRun(f"there is no probe {name!r}; there are {', '.join(probes)}")
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise CannotRun(f"its arguments are no JSON: {error}") from None
    if not isinstance(arguments, dict) or not arguments.keys() <= {"device", "quick"}:
        raise CannotRun(f'a probe takes {{"device": "cuda:0", "quick": true}} and no more, not {text}')
    return probes[name].answer(**arguments)


def _plain(value: Any) -> Any:
    """JSON has neither NaN nor infinity: both become null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main() -> None:
    # Libraries write to file descriptor 1 behind Python's back: it is stderr from here on.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    answer = ask(name, sys.argv[2] if len(sys.argv) > 2 else "{}")
    answers.write(json.dumps(_plain(answer), allow_nan=False) + "\n")
    answers.close()
    sys.stderr.flush()
    # A driver's own clean-up may hang after a fault, and the answer is out.
    os._exit(0)


if __name__ == "__main__":
    main()
