"""What is tried: every implementation of an op that says it can run here, each with every config of its space.

Other packages add candidates by an entry point that names an `Extra`, several, or a function that returns them:

    [project.entry-points."rocm_sd.candidates"]
    my-kernels = "my_package.kernels:candidates"
"""

from __future__ import annotations

import importlib.metadata
import logging
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from rocm_sd import arch
from rocm_sd.errors import InvalidOption
from rocm_sd.ops import OPS
from rocm_sd.search.pipeline import SETTINGS
from rocm_sd.tuning import lookup
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch

    from rocm_sd.ops.registry import Implementation, Op
    from rocm_sd.tuning import Problem

__all__ = ["ENTRY_POINTS", "Candidate", "Extra", "candidates", "extras", "hash_of", "operation", "operations"]

ENTRY_POINTS = "rocm_sd.candidates"
log = logging.getLogger("rocm_sd")


@dataclass(frozen=True)
class Candidate:
    """An implementation by name, and the config that it runs with."""

    implementation: str
    config: tuple[tuple[str, int], ...] = ()

    @property
    def is_stock(self) -> bool:
        return self.implementation == STOCK

    def __str__(self) -> str:
        return " ".join([self.implementation, *(f"{name}={value}" for name, value in self.config)])


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


@cache
def extras() -> tuple[Extra, ...]:
    """All that are installed. One that cannot be loaded, or has a name that is taken, is left out with a warning."""
    found: list[Extra] = []
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            loaded = point.load()
            given = loaded() if callable(loaded) and not isinstance(loaded, Extra) else loaded
            several = [given] if isinstance(given, Extra) else list(given)
        except Exception as error:  # noqa: BLE001 -- any fault of another package: it must not stop this one
            log.warning("the candidates %s are left out: %s: %s", point.name, type(error).__name__, error)
            continue
        for each in several:
            reason = _why_not(each, found)
            if reason:
                log.warning("a candidate of %s is left out: %s", point.value, reason)
            else:
                found.append(each)
    return tuple(found)


def _why_not(given: Any, before: list[Extra]) -> str | None:
    if not isinstance(given, Extra):
        return f"it is a {type(given).__name__} and no rocm_sd.search.candidates.Extra"
    built_in = _built_in()
    if given.op not in built_in:
        return f"there is no op {given.op}"
    taken = {i.name for i in built_in[given.op].implementations}
    taken |= {each.implementation.name for each in before if each.op == given.op}
    name = given.implementation.name
    return f"{given.op} has an implementation named {name}" if name in taken else None


def _built_in() -> dict[str, Op]:
    return {**OPS, **{op.name: op for op in SETTINGS}}


def operations() -> dict[str, Op]:
    """Every op and every setting of a pipeline, with what other packages add to them."""
    found = _built_in()
    for extra in extras():
        op = found[extra.op]
        found[extra.op] = replace(op, implementations=(*op.implementations, extra.implementation))
    return found


def operation(name: str) -> Op:
    known = operations()
    if name not in known:
        raise InvalidOption("op", name, list(known))
    return known[name]


def candidates(op: Op, problem: Problem, device: torch.device) -> list[Candidate]:
    """Stock first, then what the data name for this architecture, then what needs no config, then the spaces."""
    architecture = arch.detect(device)
    there = {i.name for i in op.implementations if i.why_not(problem, device) is None}
    spaces = {extra.implementation.name: extra.space for extra in extras() if extra.op == op.name}
    kernel = op.verification.implementation if op.verification is not None and op.tuning is not None else None
    if kernel is not None and op.tuning is not None:
        spaces[kernel] = op.tuning.space
    spaces |= {i.name: i.kernels.space for i in op.implementations if i.kernels is not None and i.kernels.space}
    named = lookup(op.name, architecture.name, problem)
    # What would run without a search is tried first: however early a search ends, its best is no worse than that.
    found = [Candidate(STOCK)]
    for implementation in dict.fromkeys((named.implementation, kernel)):
        if implementation in there and implementation in spaces and named.config:
            found.append(Candidate(implementation, tuple(op.config_of(implementation, named).items())))
        elif implementation in there and implementation not in spaces:
            found.append(Candidate(implementation))
    found += [Candidate(i.name) for i in op.implementations if i.name in there and i.name not in spaces]
    for name, space in spaces.items():
        if name in there:
            found += [Candidate(name, tuple(config.items())) for config in space(problem, architecture)]
    # A space may come upon the same config twice, and upon that of the data.
    unique: dict[tuple[str, frozenset[tuple[str, int]]], Candidate] = {}
    for candidate in found:
        unique.setdefault((candidate.implementation, frozenset(candidate.config)), candidate)
    return list(unique.values())


def hash_of(op: Op, implementation: str) -> str:
    """Of the source that a measurement depends on; empty for what has no kernel of this project."""
    for extra in extras():
        if (extra.op, extra.implementation.name) == (op.name, implementation):
            return extra.version
    return op.kernel_hash(implementation)
