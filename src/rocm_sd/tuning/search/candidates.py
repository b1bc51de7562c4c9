"""What is tried: every implementation of an op that says it can run here, each with every config of its space.

Plug-ins add candidates: see `rocm_sd.ops.plugins`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from rocm_sd import arch
from rocm_sd.errors import require_one_of
from rocm_sd.kernels.config import NO_CONFIG
from rocm_sd.ops import OPS
from rocm_sd.ops.plugins import PlugIn, installed
from rocm_sd.tuning.choice import STOCK
from rocm_sd.tuning.search.pipeline_settings import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from rocm_sd.kernels.config import Config
    from rocm_sd.ops.definition import Space
    from rocm_sd.ops.registry import Op
    from rocm_sd.tuning import Problem

__all__ = ["Candidate", "candidates", "hash_of", "operation", "operations", "plug_ins"]

log = logging.getLogger("rocm_sd")


@dataclass(frozen=True)
class Candidate:
    """An implementation by name, and the config that it runs with."""

    implementation: str
    config: Config = NO_CONFIG

    @property
    def is_stock(self) -> bool:
        return self.implementation == STOCK

    def __str__(self) -> str:
        return f"{self.implementation} {self.config}".rstrip()


@cache
def plug_ins() -> tuple[PlugIn, ...]:
    """The installed plug-ins whose op or setting exists; any other is skipped with a warning."""
    known = _built_in()
    found = []
    for plug_in in installed().plug_ins:
        reason = _why_not(plug_in, known)
        if reason:
            log.warning("the candidate %s is skipped: %s", plug_in.name, reason)
        else:
            found.append(plug_in)
    return tuple(found)


def _why_not(plug_in: PlugIn, known: Mapping[str, Op]) -> str | None:
    if plug_in.op not in known:
        return f"there is no op {plug_in.op}"
    taken = known[plug_in.op].has(plug_in.name)
    return f"{plug_in.op} has an implementation named {plug_in.name}" if taken else None


def _built_in() -> dict[str, Op]:
    return {**OPS, **{op.name: op for op in SETTINGS}}


def operations() -> dict[str, Op]:
    """Every op and every setting of a pipeline, with the plug-ins for them."""
    found = _built_in()
    for plug_in in plug_ins():
        op = found[plug_in.op]
        found[plug_in.op] = replace(op, implementations=(*op.implementations, plug_in.implementation))
    return found


def operation(name: str) -> Op:
    known = operations()
    require_one_of("op", name, known)
    return known[name]


def candidates(op: Op, problem: Problem, device: torch.device) -> list[Candidate]:
    """Stock first, then what the data name for this architecture, then what needs no config, then the spaces."""
    architecture = arch.detect(device)
    there = {i.name for i in op.implementations if i.why_not(problem, device) is None}
    spaces: dict[str, Space] = {each.name: each.configs for each in plug_ins() if each.op == op.name}
    kernel = op.verification.implementation if op.verification is not None and op.tuning is not None else None
    if kernel is not None and op.tuning is not None:
        spaces[kernel] = op.tuning.space
    spaces |= {i.name: i.kernels.space for i in op.implementations if i.kernels is not None and i.kernels.space}
    named = op.lookup(architecture.name, problem)
    # What would run without a search is tried first: however early a search ends, its best is no worse than that.
    found = [Candidate(STOCK)]
    for implementation in dict.fromkeys((named.implementation, kernel)):
        if implementation in there and implementation in spaces and named.config_for(implementation):
            found.append(Candidate(implementation, named.config_for(implementation)))
        elif implementation in there and implementation not in spaces:
            found.append(Candidate(implementation))
    found += [Candidate(i.name) for i in op.implementations if i.name in there and i.name not in spaces]
    for name, space in spaces.items():
        if name in there:
            found += [Candidate(name, config) for config in space(problem, architecture)]
    # A space may come upon the same config twice, and upon that of the data.
    return list(dict.fromkeys(found))


def hash_of(op: Op, implementation: str) -> str:
    """The hash of the source that a measurement depends on; empty for what has no kernel of this project."""
    for plug_in in plug_ins():
        if (plug_in.op, plug_in.name) == (op.name, implementation):
            return plug_in.version
    return op.kernel_hash(implementation)
