"""What `optimize` did to a pipeline: replaced, skipped, and why, in one sentence each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from rocm_sd.rewrite import Change

__all__ = ["Report"]


@dataclass(frozen=True)
class Report:
    """`notes` are sentences on what concerns the whole pipeline: its layout, its level. `approximations`: those of them
    that say what a quality leaves out, and why of a model nothing is. `quality`: as `optimize` was given it.
    """

    arch: str
    level: str
    quality: Any
    changes: tuple[Change, ...]
    notes: tuple[str, ...] = ()
    approximations: tuple[str, ...] = ()

    @property
    def replaced(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.replaced)

    @property
    def skipped(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if not change.replaced)

    def to_dict(self) -> dict[str, Any]:
        return {
            "arch": self.arch,
            "level": self.level,
            "quality": str(self.quality),
            "replaced": [{"path": c.path, "kind": c.kind, "rule": c.rule} for c in self.replaced],
            "skipped": [{"path": c.path, "kind": c.kind, "rule": c.rule, "why": c.why_skipped} for c in self.skipped],
            "notes": list(self.notes),
            "approximations": list(self.approximations),
        }

    def __rich__(self) -> Table:
        table = Table(title=f"rocm-sd on {self.arch}, level {self.level}, quality {self.quality}", title_justify="left")
        table.add_column("part")
        table.add_column("modules", justify="right")
        table.add_column("what was done")
        rows = Counter((c.path.split(".")[0], c.kind, c.rule, c.why_skipped) for c in self.changes)
        for (part, kind, rule, reason), count in rows.items():
            done = f"{kind}: replaced by rule {rule}" if reason is None else f"{kind}: skipped, because {reason}"
            table.add_row(escape(part), str(count), escape(done))
        for note in self.notes:
            table.add_row("pipeline", "", escape(note))
        return table

    def __str__(self) -> str:
        console = Console(width=110, force_terminal=False)
        with console.capture() as capture:
            console.print(self)
        return capture.get()
