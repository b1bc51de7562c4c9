"""A benchmark of several GPUs in words: how fast each way is, what the plan gains, and what it sends for that."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rocm_sd.bench.records import INTERVALS, OURS, STOCK
from rocm_sd.bench.several_gpus_record import TOGETHER
from rocm_sd.measuring import compare, interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rocm_sd.bench.several_gpus_record import GpusRecord, Way

__all__ = ["SHARED_CORES", "gains", "heading", "in_bytes", "notes", "rich_tables", "speeds"]

SHARED_CORES = "Processes of one CPU share its cores: nothing is gained here, it is for trying it out."
_PAIRS = ((OURS, STOCK), (TOGETHER, STOCK), (TOGETHER, OURS))
_TEXTS = {"drawn by", "against", "interval", "verdict"}


def heading(record: GpusRecord) -> str:
    facts = record.workload
    what = f"{facts.name}: {facts.width}x{facts.height}, {facts.steps} steps {facts.scheduler}"
    on = f"{record.ranks} ranks of {record.machine.device} ({record.machine.arch})"
    return f"{what}, guidance {facts.guidance:g}, {facts.dtype}, {facts.weights} weights, on {on}"


def speeds(record: GpusRecord) -> list[dict[str, str]]:
    """A row for each way: the latency of a picture, or pictures a second where a turn draws several."""
    return [_speed(record, way) for way in record.ways]


def _speed(record: GpusRecord, way: Way) -> dict[str, str]:
    several = record.pictures > 1
    cells = {"drawn by": way.name, "ranks": str(way.ranks)}
    # Whatever else a record may hold: no speed is shown where there is a reason not to.
    if way.left_out or not way.ms:
        cells |= {"pictures/s" if several else "ms a picture": "not timed", "interval": ""}
    elif several:
        found, (low, high) = median(way.ms), interval([1.0] * len(way.ms), way.ms)
        # The longest time is the lowest speed.
        rates = [_shown(record.pictures * 1e3 / each) for each in (found, high, low)]
        cells |= {"pictures/s": rates[0], "interval": f"{rates[1]} to {rates[2]}"}
    else:
        low, high = interval([1.0] * len(way.ms), way.ms)
        cells |= {"ms a picture": _shown(median(way.ms)), "interval": f"{_shown(low)} to {_shown(high)}"}
    return {**cells, "error": _figures(way.error), "stock's error": _figures(way.stock_error)}


def gains(record: GpusRecord) -> list[dict[str, str]]:
    """How many times as fast one way is as another, of those that were timed. Efficiency is that by rank."""
    found = []
    for name, against in _PAIRS:
        ours, theirs = record.way(name), record.way(against)
        if ours is None or theirs is None or not ours.ms or not theirs.ms:
            continue
        each = compare(name, against, record.pictures, ours.ms, theirs.ms)
        efficiency = f"{each.ratio / ours.ranks:.2f}" if (name, against) == (TOGETHER, OURS) else ""
        found.append({
            "drawn by": name, "against": against, "times": f"{each.ratio:.2f}",
            "interval": f"{each.low:.2f} to {each.high:.2f}", "verdict": each.verdict, "efficiency": efficiency,
        })  # fmt: skip
    return found


def notes(record: GpusRecord) -> tuple[str, ...]:
    found = [f"Plan {record.plan}, because {record.why}."]
    together = record.way(TOGETHER)
    if together is not None and together.ms:
        each = [f"{in_bytes(bytes_)} for {name}" for name, bytes_ in record.sent.items()]
        found.append(f"All ranks together send {', '.join(each) or 'nothing'} a picture.")
    if record.pictures > 1:
        found.append(f"{record.pictures} pictures are drawn in a turn; each stays on the rank that has drawn it.")
    if record.link is not None:
        found.append(f"The link has {record.link / 1e9:.1f} GB/s into a rank while all send.")
    if len(set(record.cards)) > 1:
        found.append(f"The ranks run on {', '.join(record.cards)}.")
    found += [f"{way.name} was not timed: {way.left_out}." for way in record.ways if way.left_out]
    if record.machine.arch == "cpu":
        found.append(SHARED_CORES)
    if any(way.ms for way in record.ways):
        found.append(INTERVALS)
    return tuple(found)


def rich_tables(record: GpusRecord) -> RenderableType:
    shown = [_table(rows) for rows in (speeds(record), gains(record)) if rows]
    if record.machine.arch == "cpu":
        shown[-1].caption, shown[-1].caption_justify = SHARED_CORES, "left"
    lines = (Text(note) for note in notes(record) if note != SHARED_CORES)
    return Group(Text(heading(record)), *shown, *lines)


def _table(rows: Sequence[dict[str, str]]) -> Table:
    table = Table()
    for column in rows[0]:
        # Heads of two lines: then the figures have room in 80 columns.
        table.add_column(column.replace(" ", "\n"), justify="left" if column in _TEXTS else "right")
    for row in rows:
        table.add_row(*map(escape, row.values()))
    return table


def in_bytes(count: float) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def _figures(value: float | None) -> str:
    return "" if value is None else f"{value:.2e}"


def _shown(value: float) -> str:
    """Three figures: 0.0123, 1.23, 12.3, 123."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")
