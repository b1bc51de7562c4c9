"""lookup(op, arch, problem) -> Choice: exact shape first, then the bucket, then the static choice, else stock torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal

__all__ = ["STOCK", "Choice", "Problem", "Source", "entries", "entries_with_figures", "lookup", "within"]

Problem = Mapping[str, "int | str"]
Source = Literal["forced", "measured here", "exact", "bucket", "static", "stock"]

STOCK = "torch"  # the name of the stock implementation of every op


@dataclass(frozen=True)
class Choice:
    """An implementation by name, where the choice came from, and why in one sentence.

    `config` is that of the op's kernel, also where stock torch is chosen: it is what the kernel runs with when it is
    asked for by name. `others` has the configs of other implementations with kernels of their own, by name.
    """

    implementation: str
    config: Mapping[str, int] = field(default_factory=dict)
    source: Source = "stock"
    why: str = ""
    others: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def config_for(self, name: str) -> Mapping[str, int]:
        """What the data have for an implementation, chosen or not; the op's own where they have nothing else."""
        return self.config if name == self.implementation else self.others.get(name, self.config)


@cache
def _table(op: str, arch: str) -> Mapping[str, Any] | None:
    resource = files(__package__).joinpath(f"data/{arch}/{op}.json")
    if not resource.is_file():
        return None
    table: Mapping[str, Any] = json.loads(resource.read_text(encoding="utf-8"))
    return table


def within(limits: Mapping[str, Any], problem: Problem) -> bool:
    """Each limit is a value that must be equal, or a [low, high] range, both ends included."""
    for name, limit in limits.items():
        value = problem.get(name)
        if value is None:
            return False
        if isinstance(limit, list):
            low, high = limit
            if not low <= value <= high:
                return False
        elif value != limit:
            return False
    return True


def lookup(op: str, arch: str, problem: Problem) -> Choice:
    """An architecture without data inherits nothing from another: it gets stock torch."""
    table = _table(op, arch)
    if table is None:
        return Choice(STOCK, why=f"no data for {op} on {arch}")
    source, entry = entry_for(table, problem)
    found = ((name, entry_for(part, problem)[1]) for name, part in table.get("others", {}).items())
    others = {name: other["config"] for name, other in found if "config" in other}
    return Choice(entry["implementation"], entry.get("config", {}), source, entry["why"], others)


def entry_for(part: Mapping[str, Any], problem: Problem) -> tuple[Source, Mapping[str, Any]]:
    """Of a whole table, or of the part that it has for another implementation."""
    sources: tuple[Source, ...] = ("exact", "bucket")
    for source in sources:
        for entry in part.get(source, ()):
            if within(entry["when"], problem):
                return source, entry
    return "static", part["static"]


def entries(op: str, arch: str, problem: Problem) -> dict[str, Mapping[str, Any]]:
    """The whole entry of each kernel that the data know there, by implementation: what `lookup` chooses from.

    Where stock torch or a library is chosen, the entry is that of the kernel that was searched, and is named after it.
    """
    found = {name: entry_for(part, problem)[1] for name, part in _parts(op, arch).items()}
    return {name: entry for name, entry in found.items() if "config" in entry}


def entries_with_figures(op: str, arch: str, implementation: str) -> list[Mapping[str, Any]]:
    """Those of all buckets of one kernel."""
    part = _parts(op, arch).get(implementation, {})
    return [entry for entry in part.get("bucket", ()) if "config" in entry and "figures" in entry]


def _parts(op: str, arch: str) -> dict[str, Mapping[str, Any]]:
    table = _table(op, arch)
    if table is None:
        return {}
    return {table.get("searched", {}).get("implementation", "triton"): table, **table.get("others", {})}
