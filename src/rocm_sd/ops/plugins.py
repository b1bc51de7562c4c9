"""Implementations of ops that other packages bring, by an entry point that names an `Extra`, several, or a function
that returns them:

    [project.entry-points."rocm_sd.candidates"]
    my-kernels = "my_package.kernels:candidates"

Nothing is looked for before a search, a name or a measurement asks for it. A fault of another package costs what that
package brings, and a warning; it stops no picture.
"""

from __future__ import annotations

import importlib.metadata
import logging
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from rocm_sd import arch
from rocm_sd.ops.registry import OPS, Implementation
from rocm_sd.tuning.resolve import user_database

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

    from rocm_sd.tuning import Problem
    from rocm_sd.tuning.database import Entry

__all__ = ["ENTRY_POINTS", "Extra", "Installed", "find", "installed", "of_op", "usable"]

ENTRY_POINTS = "rocm_sd.candidates"
log = logging.getLogger("rocm_sd")


def _no_configs(_problem: Problem, _arch: arch.Arch) -> Iterable[Mapping[str, int]]:
    return ({},)


@dataclass(frozen=True)
class Extra:
    """An implementation of another package for the op of that name, with the configs that are worth a trial.

    `version` is part of what a measurement is stored under: change it when the kernel changes.
    """

    op: str
    implementation: Implementation
    space: Callable[[Problem, arch.Arch], Iterable[Mapping[str, int]]] = _no_configs
    version: str = ""

    def first_config(self, problem: Problem, device: torch.device) -> Mapping[str, int] | None:
        """What it runs with where nothing was measured; None where it has no config for this problem."""
        return next(iter(self.space(problem, arch.detect(device))), None)


@dataclass(frozen=True)
class Installed:
    """`faulty`: whether an entry point could not be loaded, which was told then."""

    extras: tuple[Extra, ...]
    faulty: bool


@cache
def installed() -> Installed:
    """All that there are. One that cannot be loaded, or has a name that is taken, is left out with a warning.

    Whether there is an op of that name is not asked: a search knows settings of a pipeline beside the ops.
    """
    found: list[Extra] = []
    faulty = False
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            loaded = point.load()
            given = loaded() if callable(loaded) and not isinstance(loaded, Extra) else loaded
            several = [given] if isinstance(given, Extra) else list(given)
        except Exception as error:  # noqa: BLE001 -- any fault of another package: it must not stop this one
            log.warning("the candidates %s are left out: %s: %s", point.name, type(error).__name__, error)
            faulty = True
            continue
        for each in several:
            reason = _why_left_out(each, found)
            if reason:
                log.warning("a candidate of %s is left out: %s", point.value, reason)
            else:
                found.append(replace(each, implementation=_guarded(each)))
    return Installed(tuple(found), faulty)


def _why_left_out(given: Any, before: list[Extra]) -> str | None:
    if not isinstance(given, Extra):
        return f"it is a {type(given).__name__} and no rocm_sd.ops.plugins.Extra"
    made: Any = given.implementation
    if not isinstance(made, Implementation):
        return f"it has a {type(made).__name__} and no rocm_sd.ops.registry.Implementation"
    taken = {i.name for i in OPS[given.op].implementations} if given.op in OPS else set()
    taken |= {each.implementation.name for each in before if each.op == given.op}
    name = given.implementation.name
    return f"{given.op} has an implementation named {name}" if name in taken else None


def _guarded(extra: Extra) -> Implementation:
    """Its `why_not` raises nothing, and has a reason where the space has no config: there is nothing to run then."""
    asked = extra.implementation.why_not

    def why_not(problem: Problem, device: torch.device) -> str | None:
        try:
            reason = asked(problem, device)
            if reason:
                return str(reason)
            return None if extra.first_config(problem, device) is not None else "it has no config for this problem"
        except Exception as error:  # noqa: BLE001 -- as above
            return f"its why_not or its space raised {type(error).__name__}: {error}"

    return replace(extra.implementation, why_not=why_not)


def of_op(op: str) -> tuple[Extra, ...]:
    return tuple(extra for extra in installed().extras if extra.op == op)


def find(op: str, name: str) -> Extra | None:
    return next((extra for extra in of_op(op) if extra.implementation.name == name), None)


def usable(op: str, measured: Sequence[Entry], problem: Problem, device: torch.device) -> tuple[list[Entry], list[str]]:
    """Of measurements of what is none of the op's own, those by which one may be chosen now; and what there is to tell.

    A sentence is due for what would be chosen by a measurement and cannot be; what was no faster is passed over.
    """
    kept: list[Entry] = []
    told: list[str] = []
    for name in dict.fromkeys(entry.candidate for entry in measured):
        entries = [entry for entry in measured if entry.candidate == name]
        faster = [entry for entry in entries if entry.clearly_faster]
        if not faster:
            continue
        extra = find(op, name)
        if extra is None:
            if not installed().faulty:
                told.append(f"{name} was faster than stock torch here, and no package that is installed brings it")
            continue
        if not any(entry.kernel_hash == extra.version for entry in entries):
            told.append(f"{name} was measured in another version than is installed; type: rocm-sd tune")
            continue
        faster = [entry for entry in faster if entry.kernel_hash == extra.version]
        if not faster or user_database().why_quarantined(op, name, faster[0].environment, extra.version) is not None:
            continue
        reason = extra.implementation.why_not(problem, device)
        if reason:
            told.append(f"{name} was faster than stock torch here, and is not used: {reason}")
        else:
            kept += faster
    return kept, told
