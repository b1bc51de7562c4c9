"""What was fused: by part and fusion, how many were found of how many sites there are; and the table of it."""

from __future__ import annotations

from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table

__all__ = ["Fused", "Optimized", "OptimizedPart", "table_of"]


@dataclass(frozen=True)
class Fused:
    """A fusion in a part: how often it was found, how many sites the torch model has, and why they differ."""

    name: str
    found: int
    sites: int | None
    reason: str = ""


@dataclass(frozen=True)
class OptimizedPart:
    """`blocked`: ops that stay float32 in a float16 part. `wide_attention`: attention that is computed in float32.

    `unchecked`: why it was not compared with the plain export; "" where it was.
    """

    name: str
    float16: bool
    fusions: tuple[Fused, ...]
    blocked: tuple[str, ...] = ()
    wide_attention: int = 0
    note: str = ""
    unchecked: str = ""


@dataclass(frozen=True)
class Optimized:
    provider: str
    float16: bool
    parts: tuple[OptimizedPart, ...]


def table_of(result: Optimized) -> Table:
    table = Table(title=f"Fusions for {result.provider}")
    for name in ("part", "fusion", "found", "sites", "note"):
        table.add_column(name, justify="right" if name in {"found", "sites"} else "left")
    for part in result.parts:
        precision = "float16" if part.float16 else "float32"
        notes = [f"{precision}: {part.note}" if part.note else precision]
        if part.wide_attention:
            notes.append(f"{part.wide_attention} attention nodes in float32")
        notes.append(f"not compared with the export: {part.unchecked}" if part.unchecked else "computes the export's")
        table.add_row(part.name, "", "", "", escape("; ".join(notes)), style="bold")
        for each in part.fusions:
            sites = "?" if each.sites is None else str(each.sites)
            table.add_row("", each.name, str(each.found), sites, escape(each.reason))
    return table
