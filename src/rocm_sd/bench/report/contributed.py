"""What `rocm-sd contribute` found: every part with its state, and what failed or was skipped with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_sd.bench.card_report import FAILED, PASSED, counted
from rocm_sd.bench.report.parts import Figure, Section, Table, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rocm_sd.bench.card_report import CardReport, Part

__all__ = ["contributed"]


def contributed(reports: Sequence[CardReport]) -> Section | None:
    if not reports:
        return None
    figures: list[Figure] = []
    for report in reports:
        title = f"{report.machine.device} ({report.machine.arch}), {report.when[:10]}"
        parts = [(part.name, part.state, part.summary, shown(part.seconds)) for part in report.parts]
        marked = [number for number, part in enumerate(report.parts) if part.state == FAILED]
        table = Table.of(title, ("part", "state", "what was found", "seconds"), parts, text=(0, 1, 2), marked=marked)
        figures.append(Figure(title, table=table, notes=(f"{counted(report.parts)}.",), folded=False))
        figures += [figure for part in report.parts if (figure := _not_passed(part)) is not None]
    lead = "Each part ran in processes of its own: what crashed, hung or was wrong is recorded, and the rest went on."
    commands = tuple(dict.fromkeys(report.command for report in reports))
    return Section("contributed", "A card's own report", lead, tuple(figures), commands=commands)


def _not_passed(part: Part) -> Figure | None:
    rows = [(item.name, item.state, item.reason) for item in part.items if item.state != PASSED]
    # What failed comes first.
    rows.sort(key=lambda row: row[1] != FAILED)
    if not rows:
        return None
    title = f"{part.name}: what failed or was skipped" if rows[0][1] == FAILED else f"{part.name}: what was skipped"
    return Figure(title, table=Table.of(title, ("item", "state", "why"), rows, text=(0, 1, 2)), folded=True)
