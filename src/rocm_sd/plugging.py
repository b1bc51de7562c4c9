"""What other packages add by an entry point: one of a kind, several, or a function that returns them.

A fault of another package costs what it adds, and a warning; it stops nothing here.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar

__all__ = ["FAULTS", "added", "by_name"]

log = logging.getLogger("rocm_sd")


# Of another package: it must not stop this one, be it an error or a call of sys.exit. Ctrl-C is the user's own.
FAULTS = (Exception, SystemExit)


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_Kind = TypeVar("_Kind", bound=_Named)


def added(group: str, kind: type, what: str) -> Iterator[tuple[importlib.metadata.EntryPoint, list[Any] | None]]:
    """Each entry point with what it adds, whatever its type; None where it cannot be loaded, which is logged here."""
    for point in importlib.metadata.entry_points(group=group):
        try:
            given = point.load()
            # A class has all that a protocol asks for, and is no value of it.
            if callable(given) and (isinstance(given, type) or not isinstance(given, kind)):
                given = given()
            several = isinstance(given, Iterable) and not isinstance(given, (str, kind))
            values: list[Any] | None = list(given) if several else [given]
        except FAULTS as error:
            log.warning("the %s %s is skipped: %s: %s", what, point.name, type(error).__name__, error)
            values = None
        yield point, values


def by_name(group: str, kind: type[_Kind], what: str, built_in: Iterable[_Kind]) -> dict[str, _Kind]:
    """All that are built in or installed, by `name`; what is of another kind or has a taken name is skipped."""
    found: dict[str, Any] = {each.name: each for each in built_in}
    for point, values in added(group, kind, what):
        for each in values or ():
            if not isinstance(each, kind):
                reason = f"{point.value} is a {type(each).__name__} and no {kind.__module__}.{kind.__name__}"
                log.warning("the %s %s is skipped: %s", what, point.name, reason)
            elif each.name in found:
                log.warning("the %s %s is skipped: there is one of that name", what, f"{each.name} of {point.value}")
            else:
                found[each.name] = each
    return found
