"""What is tried: every implementation of an op that says it can run here, each with every config of its space.

Plug-ins add candidates: see `rocm_sd.ops.plugins`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from rocm_sd import arch
from rocm_sd.errors import InvalidOption
from rocm_sd.ops import OPS
from rocm_sd.ops.plugins import Extra, installed
from rocm_sd.tuning import lookup
from rocm_sd.tuning.choice import STOCK
from rocm_sd.tuning.search.pipeline_settings import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from rocm_sd.ops.registry import Op
    from rocm_sd.tuning import Problem

__all__ = ["Candidate", "Extra", "candidates", "extras", "hash_of", "operation", "operations"]

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


@cache
def extras() -> tuple[Extra, ...]:
    """Of all that are installed those for an op, or a setting, that there is; another is skipped with a warning."""
    known = _built_in()
    found = []
    for extra in installed().extras:
        reason = _why_not(extra, known)
        if reason:
            log.warning("the candidate %s is skipped: %s", extra.implementation.name, reason)
        else:
            found.append(extra)
    return tuple(found)


def _why_not(extra: Extra, known: Mapping[str, Op]) -> str | None:
    if extra.op not in known:
        return f"there is no op {extra.op}"
    name = extra.implementation.name
    taken = any(i.name == name for i in known[extra.op].implementations)
    return f"{extra.op} has an implementation named {name}" if taken else None


def _built_in() -> dict[str, Op]:
    return {**OPS, **{op.name: op for op in SETTINGS}}


def operations() -> dict[str, Op]:
    """Every op and every setting of a pipeline, with the plug-ins for them."""
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
