"""A plug-in of pytest for `diffusers_tests.py`: every pipeline that a test makes is optimised, and outcomes are noted.

`ROCM_SD_TESTS_NOTED` names the file for the outcomes, a line of JSON each. `ROCM_SD_TESTS_WHEN` says when a pipeline is
optimised: `created`, before the test does anything with it, `called`, after the test has loaded and changed what it
wants, or `never`.
"""

from __future__ import annotations

import json
import os
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

# Before the checkout's own source is put on the path: what is tested is the Diffusers that is installed.
from diffusers import DiffusionPipeline

from rocm_sd.engine.calibration import named
from rocm_sd.engine.optimization import optimize_with
from rocm_sd.engine.parts import Parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest

_NOTED = Path(os.environ["ROCM_SD_TESTS_NOTED"])
_WHEN = os.environ["ROCM_SD_TESTS_WHEN"]
# Without a GPU the shipped data would leave most rules out, being no faster there; what a GPU gets is to be tested.
_PARTS = Parts() if torch.cuda.is_available() else Parts(plan=named("channels_last").name)
_OPTIMIZED: WeakSet[Any] = WeakSet()
# A pipeline's constructor may call that of the class it is derived from.
_UNDER_WAY: set[int] = set()


def _note(**what: Any) -> None:
    with _NOTED.open("a", encoding="utf-8") as file:
        file.write(json.dumps(what) + "\n")


def _kinds(kind: type) -> Iterator[type]:
    yield kind
    for further in kind.__subclasses__():
        yield from _kinds(further)


def _optimized(pipe: Any) -> None:
    # Marked first: a pipeline that cannot be optimised fails its test once, where it is used.
    _OPTIMIZED.add(pipe)
    optimize_with(pipe, "auto", "exact", _PARTS)


def _when_created(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        outermost = id(self) not in _UNDER_WAY
        _UNDER_WAY.add(id(self))
        try:
            init(self, *args, **kwargs)
        finally:
            if outermost:
                _UNDER_WAY.discard(id(self))
        if outermost:
            _optimized(self)

    return wrapped


def _when_called(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self not in _OPTIMIZED:
            _optimized(self)
        return call(self, *args, **kwargs)

    return wrapped


def pytest_collection_finish(session: pytest.Session) -> None:
    """All pipelines that tests use are imported by now."""
    _note(count=len(session.items))
    name, wrap = {"created": ("__init__", _when_created), "called": ("__call__", _when_called)}.get(_WHEN, ("", None))
    if wrap is None:
        return
    for kind in dict.fromkeys(_kinds(DiffusionPipeline)):
        if name in vars(kind):
            setattr(kind, name, wrap(vars(kind)[name]))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _note(test=report.nodeid, outcome="failed", why=_last_line(report.longreprtext))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test is its call, and what came instead of it or broke after it."""
    if report.when == "call" or report.outcome != "passed":
        _note(test=report.nodeid, outcome=report.outcome, why=_last_line(report.longreprtext))


def _last_line(text: str) -> str:
    errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return (errors or text.splitlines() or [""])[0][:300]
