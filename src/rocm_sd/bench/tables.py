"""A record as a table: for a terminal, as CSV with every figure, and as Markdown for a README."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rocm_sd.bench.records import INTERVALS, NOT_LOADED, Comparison, Measurement, Record
from rocm_sd.bench.verdict import problems

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["COLUMNS", "LOSSY_NOTE", "csv_text", "heading", "markdown", "notes", "rich_tables", "rows"]

LOSSY_NOTE = (
    "Engines with a quality approximate: their error is against their own definition, and PSNR, SSIM and prompt match "
    "are of their pictures against stock's of the same prompts and seeds."
)
COLUMNS: tuple[str, ...] = (
    "engine", "version", "provider", "batch", "model", "size", "steps", "average ms", "p50 ms", "p90 ms", "card ms",
    "images/s", "it/s",
    "first-run MiB", "second-run MiB", "first picture s", "warm-up s", "power W", "J/image", "% of floor",
    "error", "stock's error", "x stock", "x stock low", "x stock high", "verdict", "left out",
    "quality", "prompts", "PSNR dB", "SSIM", "match points", "pictures", "load s", "load again s",
)  # fmt: skip
# Of the whole record: a heading and a note say them once, and a program reads them in every row.
_SHARED = {"model", "size", "steps", "load s", "load again s"}
# A usual terminal has room for a third of them.
_SPEED = ("engine", "batch", "average ms", "p50 ms", "p90 ms", "card ms", "images/s", "it/s", "% of floor")
# Stock's error stands in its own row.
_AGAINST = ("engine", "batch", "x stock", "interval", "verdict", "error")
# Of engines that approximate, and of no other.
_PICTURES = ("engine", "batch", "quality", "prompts", "PSNR dB", "SSIM", "match points", "pictures")
_PRICE = ("engine", "batch", "first-run MiB", "second-run MiB", "first picture s", "power W", "J/image")
_TEXTS = {"engine", "provider", "interval", "verdict", "quality", "match points", "pictures"}


def rows(record: Record) -> list[dict[str, str]]:
    """One for each measurement, every column as text; empty where it was not measured or does not apply."""
    return [_row(record, one) for one in record.measurements]


def _row(record: Record, one: Measurement) -> dict[str, str]:
    cells = {
        "engine": one.engine,
        "version": one.version,
        "provider": one.provider,
        **_shared(record),
        "batch": _case(record, one.batch),
        "first-run MiB": _number(one.first_run_mib, 0),
        "second-run MiB": _number(one.second_run_mib, 0),
        "first picture s": _number(one.first_picture_s, 1),
        "warm-up s": _number(one.warm_up_s, 1),
        "power W": _number(one.power_watt, 0),
        "error": _figures(one.error),
        "stock's error": _figures(one.stock_error),
        "left out": one.left_out or "",
        **_pictures(one),
    }
    # No speed is shown where there is a reason not to, whatever else a record may hold.
    if one.ms and not one.left_out and not any(problems(one.engine, one.quality, claims=False)):
        cells |= {
            "average ms": _milliseconds(one.average_ms),
            "p50 ms": _milliseconds(one.p50_ms),
            "p90 ms": _milliseconds(one.p90_ms),
            "card ms": "" if one.card_ms is None else _milliseconds(one.card_ms),
            "J/image": _number(one.energy_joule, 1),
            "% of floor": _number(one.floor_percent, 1),
        }
        if record.kind != "op":
            cells |= {"images/s": f"{one.images_per_s:.3f}", "it/s": f"{one.steps_per_s:.2f}"}
        comparison = _against_stock(record, one)
        if comparison is not None:
            cells |= {
                "x stock": f"{comparison.ratio:.3f}",
                "x stock low": f"{comparison.low:.3f}",
                "x stock high": f"{comparison.high:.3f}",
                "verdict": comparison.verdict,
            }
    return {column: cells.get(column, "") for column in COLUMNS}


def _shared(record: Record) -> dict[str, str]:
    facts = record.workload
    if record.kind == "op":
        return {"model": facts.model}
    return {
        "model": facts.model,
        "size": f"{facts.width}x{facts.height}",
        "steps": str(facts.steps),
        "load s": _number(record.loading.cold_s, 2),
        "load again s": _number(record.loading.warm_s, 2),
    }


def _pictures(one: Measurement) -> dict[str, str]:
    """Of an engine that approximates: how far its pictures are from the exact ones, and within which budget."""
    quality = one.quality
    if not quality.is_lossy:
        return {}
    if not quality.is_scored:
        return {"quality": quality.name, "pictures": quality.verdict}
    return {
        "quality": quality.name,
        "prompts": str(quality.prompts),
        "PSNR dB": quality.psnr_words,
        "SSIM": f"{quality.mean_ssim:.3f}",
        "match points": quality.match_words or "not measured",
        "pictures": quality.verdict,
    }


def _against_stock(record: Record, one: Measurement) -> Comparison | None:
    # Ours is also compared with each of the others; those comparisons come after the ones with stock.
    return next((c for c in record.comparisons if c.engine == one.engine and c.batch == one.batch), None)


def _case(record: Record, batch: int) -> str:
    return record.op_cases[batch - 1] if record.kind == "op" and batch <= len(record.op_cases) else str(batch)


def csv_text(record: Record) -> str:
    written = io.StringIO()
    writer = csv.DictWriter(written, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(record))
    return written.getvalue()


def markdown(record: Record) -> str:
    """The heading, the table without columns that have nothing in them, and what was skipped."""
    every = rows(record)
    columns = [c for c in _merged() if any(_merged_cell(row, c) for row in every)]
    lines = [heading(record), "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += [
        "| " + " | ".join(_merged_cell(row, column).replace("|", "\\|") for column in columns) + " |" for row in every
    ]
    said = notes(record)
    return "\n".join([*lines, *(["", *(f"- {note}" for note in said)] if said else [])]) + "\n"


def _merged() -> list[str]:
    """As people read it: the ratio with its interval in one column."""
    return [c for c in COLUMNS if c not in {"x stock low", "x stock high", "verdict", "left out"} | _SHARED]


def _merged_cell(row: dict[str, str], column: str) -> str:
    if column == "x stock" and row["x stock"]:
        interval = f"{row['x stock']} ({row['x stock low']} to {row['x stock high']})"
        return f"{interval}, no difference" if row["verdict"] == "no difference" else interval
    if column == "p50 ms" and row["left out"]:
        return "skipped"
    return row[column]


def rich_tables(record: Record) -> RenderableType:
    """How fast, how much faster than stock and how exact, and at what price."""
    every = rows(record)
    for row in every:
        row["interval"] = f"{row['x stock low']} to {row['x stock high']}" if row["x stock"] else ""
    if record.kind == "op":
        # Whoever computes is chosen call by call.
        groups: tuple[tuple[str, ...], ...] = (("batch", "engine", "provider", *_SPEED[2:]), _AGAINST)
        words = ""
    else:
        # With the card's own time there is no room for the mean: the median is there.
        dropped = "average ms" if any(row["card ms"] for row in every) else ""
        groups = (tuple(column for column in _SPEED if column != dropped), _AGAINST, _PICTURES, _PRICE)
        words = "; ".join(dict.fromkeys(f"{row['engine']}: {row['version']}, by {row['provider']}" for row in every))
    parts: list[RenderableType] = [Text(line) for line in (heading(record), words) if line]
    shown = (_table(columns, every, record.kind) for columns in groups)
    parts += [table for table in shown if table is not None]
    return Group(*parts, *(Text(note) for note in notes(record)))


def _table(columns: Sequence[str], every: list[dict[str, str]], kind: str) -> Table | None:
    """Rows that have more than their name, and columns that have something in them."""
    keys = {"engine", "batch", "provider"}
    kept = [row for row in every if any(row[column] for column in columns if column not in keys)]
    shown = [column for column in columns if any(row[column] for row in kept)]
    if set(shown) <= keys:
        return None
    table = Table()
    for column in shown:
        is_text = column in _TEXTS or (column == "batch" and kind == "op")
        name = "call" if column == "batch" and kind == "op" else column
        # Heads of two lines: then the figures have room in 80 columns.
        head = name.replace("% of ", "% of\n") if "%" in name else name.replace(" ", "\n")
        table.add_column(head, justify="left" if is_text else "right", overflow="fold")
    for row in kept:
        table.add_row(*(escape(row[column]) for column in shown))
    return table


def heading(record: Record) -> str:
    facts = record.workload
    on = f"{record.machine.device} ({record.machine.arch})"
    if record.kind == "op":
        return f"{facts.name} on {on}, {facts.dtype}"
    what = f"{facts.name}: {facts.width}x{facts.height}, {facts.steps} steps {facts.scheduler}"
    return f"{what}, guidance {facts.guidance:g}, {facts.dtype}, {facts.weights} weights, on {on}"


def notes(record: Record) -> list[str]:
    said = [
        f"{one.engine} was skipped{_where(record, one)}: {one.left_out}" for one in record.measurements if one.left_out
    ]
    said += [f"{one.engine}{_where(record, one)}: {note}" for one in record.measurements for note in one.notes]
    if record.loading != NOT_LOADED:
        said.append(f"{record.loading}.")
    said += record.notes
    if any(one.quality.is_lossy and one.ms for one in record.measurements):
        said.append(LOSSY_NOTE)
    if record.comparisons:
        said.append(INTERVALS)
    if any(c.verdict == "no difference" for c in record.comparisons):
        said.append("no difference: the interval contains 1, or the difference is smaller than the spread.")
    if not record.complete:
        said.append("This run was interrupted: the figures are of the turns that it had.")
    return list(dict.fromkeys(said))


def _where(record: Record, one: Measurement) -> str:
    return f" at {_case(record, one.batch)}" if record.kind == "op" else f" at batch {one.batch}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _figures(value: float | None) -> str:
    return "" if value is None else f"{value:.2e}"


def _milliseconds(value: float) -> str:
    """Four figures: an op takes a hundredth of a millisecond, a picture on a CPU many thousands."""
    return f"{value:.4g}" if value < 1000 else f"{value:.0f}"
