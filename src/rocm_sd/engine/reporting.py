"""What `optimize` did to a pipeline: a verdict in a few lines, and a table of what was replaced or skipped, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rocm_sd.engine.verdict import verdict
from rocm_sd.engine.verdict_facts import Facts

if TYPE_CHECKING:
    from rocm_sd.rewrite import Change

__all__ = ["Report"]


@dataclass(frozen=True, repr=False)
class Report:
    """`notes` are sentences on what concerns the whole pipeline: its layout, its level. `approximations`: those of them
    that say what a quality leaves out, and why of a model nothing is. `quality`: as `optimize` was given it. `facts`:
    what the verdict is made of, besides these. `verbose`: whether it is printed with its details.
    """

    arch: str
    level: str
    quality: Any
    changes: tuple[Change, ...]
    notes: tuple[str, ...] = ()
    approximations: tuple[str, ...] = ()
    facts: Facts = field(default_factory=Facts)
    verbose: bool = False

    @property
    def replaced(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.replaced)

    @property
    def skipped(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if not change.replaced)

    @property
    def lines(self) -> list[str]:
        """The verdict, what it rests on, and what to type for more: five lines of 80 characters at most."""
        return verdict(self)

    @property
    def details(self) -> str:
        """The table of all modules, by what was done to them, and every note."""
        return _printed(self._table())

    def to_dict(self) -> dict[str, Any]:
        return {
            "arch": self.arch,
            "level": self.level,
            "quality": str(self.quality),
            "verdict": self.lines[0],
            "replaced": [{"path": c.path, "kind": c.kind, "rule": c.rule} for c in self.replaced],
            "skipped": [{"path": c.path, "kind": c.kind, "rule": c.rule, "why": c.why_skipped} for c in self.skipped],
            "notes": list(self.notes),
            "approximations": list(self.approximations),
        }

    def _table(self) -> Table:
        table = Table(title=f"rocm-sd on {self.arch}, level {self.level}, quality {self.quality}", title_justify="left")
        table.add_column("part")
        table.add_column("modules", justify="right")
        table.add_column("what was done")
        # Several rules may look at one module, which counts once.
        rows: dict[tuple[str, str], dict[tuple[str, str], None]] = {}
        for change in self.changes:
            done = "replaced" if change.why_skipped is None else f"skipped, because {change.why_skipped}"
            # Of what was replaced the rules differ; of what was skipped the reason is told once.
            by_rule = f"{change.kind} by rule {change.rule}" if change.replaced else change.kind
            rows.setdefault((change.path.split(".")[0], done), {})[change.path, by_rule] = None
        for (part, done), modules in rows.items():
            kinds = Counter(kind for _, kind in modules)
            named = ", ".join(kind if count == 1 else f"{count} {kind}" for kind, count in kinds.items())
            table.add_row(escape(part), str(len({path for path, _ in modules})), escape(f"{done}: {named}"))
        for note in self.notes:
            table.add_row("pipeline", "", escape(note))
        return table

    def __rich__(self) -> RenderableType:
        # As they are: a console would colour their numbers and break them where it likes.
        lines = [Text(line) for line in self.lines]
        return Group(*lines, self._table()) if self.verbose else Group(*lines)

    def __str__(self) -> str:
        shown = "\n".join(self.lines)
        return f"{shown}\n\n{self.details}" if self.verbose else shown

    def __repr__(self) -> str:
        """What a prompt of Python or a notebook shows of `rocm_sd.report(pipe)`."""
        return str(self)


def _printed(table: Table) -> str:
    console = Console(width=110, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()
