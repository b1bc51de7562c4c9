"""Implementations of ops from other packages, by an entry point that names a `PlugIn`, several, or a function that
returns them:

    [project.entry-points."rocm_sd.candidates"]
    my-kernels = "my_package.kernels:candidates"

Nothing is looked for before a search, a name or a measurement asks for it. A fault of another package costs its
plug-ins, and a warning; it stops no picture.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

from rocm_sd import arch, plugging
from rocm_sd.kernels.config import NO_CONFIG, Config, OpenConfig
from rocm_sd.ops.definition import Implementation
from rocm_sd.tuning.resolve import user_database

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch

    from rocm_sd.tuning import Problem
    from rocm_sd.tuning.database import Entry

__all__ = [
    "ENTRY_POINTS", "Extra", "Installed", "PlugIn", "add_source", "find", "installed", "of_op", "reserve", "usable",
]  # fmt: skip

ENTRY_POINTS = "rocm_sd.candidates"
log = logging.getLogger("rocm_sd")


def _no_configs(_problem: Problem, _arch: arch.Arch) -> Iterable[Mapping[str, int]]:
    return ({},)


@dataclass(frozen=True)
class PlugIn:
    """An implementation of another package for the op of that name, with the configs that are worth a trial.

    A config is a mapping of names to whole numbers, or of the class of the implementation's `default` where it has one.
    `version` is part of what a measurement is stored under: change it when the kernel changes.
    """

    op: str
    implementation: Implementation
    space: Callable[[Problem, arch.Arch], Iterable[Config | Mapping[str, int]]] = _no_configs
    version: str = ""

    @property
    def name(self) -> str:
        return self.implementation.name

    def configs(self, problem: Problem, architecture: arch.Arch) -> Iterator[Config]:
        for each in self.space(problem, architecture):
            yield each if isinstance(each, Config) else OpenConfig.fitting(each) if each else NO_CONFIG

    def first_config(self, problem: Problem, device: torch.device) -> Config | None:
        """What it runs with where nothing was measured; None where it has no config for this problem."""
        return next(self.configs(problem, arch.detect(device)), None)


# The name by which packages know it.
Extra = PlugIn


@dataclass(frozen=True)
class Installed:
    """`faulty`: whether an entry point could not be loaded, which was logged then."""

    plug_ins: tuple[PlugIn, ...]
    faulty: bool


_reserved: dict[str, frozenset[str]] = {}
_sources: list[Callable[[], Iterable[PlugIn]]] = []


def reserve(op: str, names: Iterable[str]) -> None:
    """The names of an op's own implementations, which no plug-in may have."""
    _reserved[op] = frozenset(names)


def add_source(plug_ins: Callable[[], Iterable[PlugIn]]) -> None:
    """Plug-ins that no package has: what a user has accepted."""
    _sources.append(plug_ins)


@cache
def installed() -> Installed:
    """All that there are. One that cannot be loaded, or has a name that is taken, is skipped with a warning.

    Whether there is an op of that name is not asked: a search knows settings of a pipeline, too.
    """
    found: list[PlugIn] = []
    faulty = False
    for point, values in plugging.added(ENTRY_POINTS, PlugIn, "plug-in"):
        faulty = faulty or values is None
        for each in values or ():
            reason = _why_skipped(each, found)
            if reason:
                log.warning("a candidate of %s is skipped: %s", point.value, reason)
            else:
                found.append(replace(each, implementation=_guarded(each)))
    for plug_in in (each for source in _sources for each in source()):
        if not _why_skipped(plug_in, found):
            found.append(replace(plug_in, implementation=_guarded(plug_in)))
    return Installed(tuple(found), faulty)


def _why_skipped(given: Any, before: list[PlugIn]) -> str | None:
    if not isinstance(given, PlugIn):
        return f"it is a {type(given).__name__} and no rocm_sd.ops.plugins.PlugIn"
    made: Any = given.implementation
    if not isinstance(made, Implementation):
        return f"it has a {type(made).__name__} and no rocm_sd.ops.definition.Implementation"
    taken = given.name in _reserved.get(given.op, ())
    taken = taken or any((each.op, each.name) == (given.op, given.name) for each in before)
    return f"{given.op} has an implementation named {given.name}" if taken else None


def _guarded(plug_in: PlugIn) -> Implementation:
    """Its `why_not` raises nothing, and has a reason where the space has no config: there is nothing to run then."""
    made = plug_in.implementation

    def why_not(problem: Problem, device: torch.device) -> str | None:
        try:
            reason = made.why_not(problem, device)
            if reason:
                return str(reason)
            return None if plug_in.first_config(problem, device) is not None else "it has no config for this problem"
        except plugging.FAULTS as error:
            return f"its why_not or its space raised {type(error).__name__}: {error}"

    @wraps(made.run)
    def run(*arguments: Any, config: Config) -> Any:
        return made.run(*arguments, config=config.to_dict())

    # x must be whole where stock torch takes over from one that raises.
    guarded = replace(made, why_not=why_not, overwrites=False)
    return guarded if made.default else replace(guarded, run=run, default=OpenConfig())


def of_op(op: str) -> tuple[PlugIn, ...]:
    return tuple(plug_in for plug_in in installed().plug_ins if plug_in.op == op)


def find(op: str, name: str) -> PlugIn | None:
    return next((plug_in for plug_in in of_op(op) if plug_in.name == name), None)


def usable(op: str, measured: Sequence[Entry], problem: Problem, device: torch.device) -> tuple[list[Entry], list[str]]:
    """Of measurements of what is none of the op's own, those by which a plug-in may be chosen now; and notes.

    A note is due for what would be chosen by a measurement and cannot be; what was no faster is passed over.
    """
    kept: list[Entry] = []
    notes: list[str] = []
    for name in dict.fromkeys(entry.candidate for entry in measured):
        entries = [entry for entry in measured if entry.candidate == name]
        faster = [entry for entry in entries if entry.clearly_faster]
        if not faster:
            continue
        plug_in = find(op, name)
        if plug_in is None:
            if not installed().faulty:
                notes.append(f"{name} was faster than stock torch here, and no package that is installed has it")
            continue
        if not any(entry.kernel_hash == plug_in.version for entry in entries):
            notes.append(f"{name} was measured in another version than is installed; type: rocm-sd tune")
            continue
        faster = [entry for entry in faster if entry.kernel_hash == plug_in.version]
        if not faster or user_database().why_quarantined(op, name, faster[0].environment, plug_in.version) is not None:
            continue
        reason = plug_in.implementation.why_not(problem, device)
        if reason:
            notes.append(f"{name} was faster than stock torch here, and is not used: {reason}")
        else:
            kept += faster
    return kept, notes
