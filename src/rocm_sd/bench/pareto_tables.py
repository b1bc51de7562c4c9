"""A survey of settings as a table for a terminal, and as a Markdown page with its plot."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rocm_sd.bench.pareto_points import EXACT, points
from rocm_sd.bench.records import INTERVALS, STOCK
from rocm_sd.bench.verdict import EQUAL_DB
from rocm_sd.measuring import LEAST_TURNS
from rocm_sd.quality.budget import BUDGETS

if TYPE_CHECKING:
    from rocm_sd.bench.pareto_points import Point
    from rocm_sd.bench.records import Measurement, Record

__all__ = ["HEADINGS", "headings_of", "markdown", "notes", "rich_tables", "rows", "title", "turns"]

HEADINGS = (
    "setting", "p50 ms", "times stock", "times exact", "PSNR dB", "SSIM", "match points", "pictures", "on the front",
)  # fmt: skip
_SPEED = ("setting", "p50 ms", "times stock", "times exact", "on the front")
_PICTURES = ("setting", "PSNR dB", "SSIM", "match points", "pictures", "on the front")
_RIGHT = {"p50 ms", "PSNR dB", "SSIM"}


def turns(record: Record) -> int:
    return max((len(one.ms) for one in record.measurements), default=0)


def title(record: Record) -> tuple[str, str]:
    """A line, and the conditions in another."""
    facts = record.workload
    planned = record.extra.get("prompts")
    of_all = f" of {len(planned)}" if isinstance(planned, list) and not record.complete else ""
    prompts = f"{turns(record)}{of_all} prompts"
    drawn = f"{facts.steps} steps {facts.scheduler}, guidance {facts.guidance:g}, {facts.width}x{facts.height}"
    where = f"on {record.machine.device} ({record.machine.arch})"
    return f"{facts.name}: speed against quality", f"{drawn}, {facts.dtype}, {prompts}, {where}"


def rows(record: Record) -> list[tuple[str, ...]]:
    """One for each that was timed, the fastest last as they stand on the front."""
    found = {point.name: point for point in points(record)}
    timed = [one for one in record.measurements if one.engine in found]
    return [_row(record, one, found[one.engine]) for one in timed]


def _row(record: Record, one: Measurement, point: Point) -> tuple[str, ...]:
    quality = one.quality
    psnr = "equal" if math.isinf(point.psnr) or point.psnr >= EQUAL_DB else f"{point.psnr:.1f}"
    return (
        one.engine,
        f"{one.p50_ms:.0f}" if one.p50_ms >= 100 else f"{one.p50_ms:.3g}",
        "1" if one.engine == STOCK else _times(record, one.engine, STOCK),
        _times(record, one.engine, EXACT),
        "" if one.engine == EXACT else psnr,
        f"{quality.mean_ssim:.3f}" if quality.is_scored else "",
        (quality.match_words or "not measured") if quality.is_scored else "",
        "as they come" if one.engine == STOCK else quality.verdict,
        "yes" if point.on_front else "",
    )


def _times(record: Record, name: str, against: str) -> str:
    for one in record.comparisons:
        if (one.engine, one.against) == (name, against):
            ratio = one.verdict if one.verdict == "no difference" else f"{one.ratio:.2f}"
            return f"{ratio} ({one.low:.2f} to {one.high:.2f})"
    return ""


def headings_of(table: list[tuple[str, ...]]) -> list[int]:
    """Columns that have something in them."""
    return [place for place in range(len(HEADINGS)) if any(row[place] for row in table)]


def notes(record: Record) -> list[str]:
    found = [f"{one.engine}: {one.left_out}" for one in record.measurements if one.left_out]
    found += record.notes
    budgets = "; ".join(f"{name}: {budget}" for name, budget in BUDGETS.items())
    found.append(f"Pictures are scored against the exact ones of the same prompts and seeds. At least, {budgets}.")
    unlike = [one.engine for one in record.measurements if one.ms and one.notes]
    if unlike:
        found.append(f"Not compared with a definition in float64, which would decide otherwise: {', '.join(unlike)}.")
    if any(one.quality.match for one in record.measurements):
        found.append(f"One picture of {turns(record)} is {100 / max(turns(record), 1):.1f} points of prompt match.")
    if record.comparisons:
        found.append(INTERVALS)
        if turns(record) < LEAST_TURNS:
            found.append(f"Fewer than {LEAST_TURNS} prompts cannot tell a difference of times: give more.")
    if not record.complete:
        found.append("This run was interrupted: the figures are of the prompts that it had.")
    return found


def rich_tables(record: Record) -> RenderableType:
    """How fast, and how near: both in 80 columns."""
    every = rows(record)
    parts: list[RenderableType] = [Text(line) for line in title(record)]
    for columns in (_SPEED, _PICTURES):
        table = Table()
        for heading in columns:
            table.add_column(heading, justify="right" if heading in _RIGHT else "left")
        for row in every:
            cells = [escape(row[HEADINGS.index(heading)]) for heading in columns]
            # The front stands out; a terminal without styles has the last column.
            table.add_row(*cells, style="bold" if row[-1] else None)
        parts.append(table)
    return Group(*parts)


def markdown(record: Record, plot: str | None) -> str:
    """`plot`: the name of the picture beside it."""
    heading, conditions = title(record)
    every = rows(record)
    kept = headings_of(every)
    lines = [f"# {heading}", "", f"{conditions}, {record.when[:10]}.", ""]
    if plot:
        lines += [f"![Times stock across, median PSNR up, every setting a point]({plot})", ""]
    lines += ["| " + " | ".join(HEADINGS[place] for place in kept) + " |"]
    lines += ["|" + "|".join("---:" if HEADINGS[place] in _RIGHT else "---" for place in kept) + "|"]
    lines += ["| " + " | ".join(row[place].replace("|", "\\|") for place in kept) + " |" for row in every]
    lines += ["", *(f"- {note}" for note in notes(record)), "", "```sh", record.command, "```"]
    return "\n".join(lines) + "\n"
