"""lookup(op, arch, problem) -> Choice: exact shape first, then the bucket, then the static choice, else stock torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal

__all__ = ["STOCK", "Choice", "Problem", "Source", "lookup"]

Problem = Mapping[str, "int | str"]
Source = Literal["forced", "measured here", "exact", "bucket", "static", "stock"]

STOCK = "torch"  # the name of the stock implementation of every op


@dataclass(frozen=True)
class Choice:
    """An implementation by name, where the choice came from, and why in one sentence.

    `config` is that of the op's kernel, also where stock torch is chosen: it is what the kernel runs with when it is
    asked for by name.
    """

    implementation: str
    config: Mapping[str, int] = field(default_factory=dict)
    source: Source = "stock"
    why: str = ""


@cache
def _table(op: str, arch: str) -> Mapping[str, Any] | None:
    resource = files("rocm_sd.tuning").joinpath(f"data/{arch}/{op}.json")
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
    for source in ("exact", "bucket"):
        for entry in table.get(source, ()):
            if within(entry["when"], problem):
                return Choice(entry["implementation"], entry.get("config", {}), source, entry["why"])
    static = table["static"]
    return Choice(static["implementation"], static.get("config", {}), "static", static["why"])
