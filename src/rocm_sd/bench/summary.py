"""A record on a terminal: one table as wide as the terminal takes, and one sentence that says what came of it.

What has no room (versions, percentiles, power, what an interval is) is in the files, and in tables.rich_tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.measure import Measurement as Width
from rich.table import Table

from rocm_sd.bench import tables
from rocm_sd.bench.records import COMPILE, OURS, STOCK
from rocm_sd.plain_json import shortened

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, ConsoleOptions

    from rocm_sd.bench.records import Comparison, Measurement, Record

__all__ = ["SummaryTable", "notes", "verdict"]

# By what a reader asks first; the last ones give way where there is no room. Heads of two lines leave it to figures.
_COLUMNS = (
    ("engine", "engine"), ("batch", "batch"), ("p50 ms", "p50\nms"),
    ("x stock", "times stock\n(interval)"), ("pictures", "pictures"), ("card ms", "card\nms"),
    ("images/s", "images\n/s"), ("second-run MiB", "memory\nMiB"), ("error", "error"), ("first picture s", "first\ns"),
)  # fmt: skip
_ANY_WIDTH = 1000
_KEYS = ("engine", "batch")
_TEXTS = frozenset({"engine", "x stock", "pictures"})


@dataclass(frozen=True)
class SummaryTable:
    """Of the columns that have something in them, as many as fit; the rest is in the record."""

    record: Record

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        if self.record.kind == "op":
            yield _of_ops(self.record)
            return
        every = [_cells(row) for row in tables.rows(self.record)]
        shown = [name for name, _ in _COLUMNS if any(row[name] for row in every)]
        if len({row["batch"] for row in every}) == 1:
            shown = [name for name in shown if name != "batch"]
        table = _table(shown, every)
        unbounded = options.update(width=_ANY_WIDTH)
        while len(shown) > len(_KEYS) and Width.get(console, unbounded, table).maximum > options.max_width:
            shown = shown[:-1]
            table = _table(shown, every)
        yield table


def _cells(row: dict[str, str]) -> dict[str, str]:
    cells = {name: row.get(name, "") for name, _ in _COLUMNS} | {"x stock": _ratio(row)}
    cells["p50 ms"] = "skipped" if row["left out"] else row["p50 ms"]
    cells["error"] = f"{float(row['error']):.1e}" if row["error"] else ""
    return cells


def _ratio(row: dict[str, str]) -> str:
    if not row["x stock"]:
        return ""
    low, high = _ends(float(row["x stock low"]), float(row["x stock high"]))
    return f"{float(row['x stock']):.2f} ({low}-{high})"


def _of_ops(record: Record) -> Table:
    """A row for each call, both engines in it; a call may be folded, and its figures never are."""
    table = Table()
    table.add_column("call", overflow="fold")
    for head in ("stock\nms", f"{OURS}\nms"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("times stock\n(interval)", no_wrap=True)
    calls: dict[str, dict[str, dict[str, str]]] = {}
    for row in tables.rows(record):
        calls.setdefault(row["batch"], {})[row["engine"]] = row
    for call, rows in calls.items():
        ours = next((row for engine, row in rows.items() if engine != STOCK), {})
        cells = [_milliseconds(rows.get(STOCK, {})), _milliseconds(ours), _ratio(ours) if ours else ""]
        table.add_row(escape(call), *map(escape, cells))
    return table


def _milliseconds(row: dict[str, str]) -> str:
    return "skipped" if row.get("left out") else row.get("p50 ms", "")


def _ends(low: float, high: float) -> tuple[str, str]:
    """Of an interval: one that ends near 1 has three places, since 1.003 is not 1.00."""
    digits = 3 if any(0.995 <= end < 1.005 for end in (low, high)) else 2
    return f"{low:.{digits}f}", f"{high:.{digits}f}"


def _table(names: list[str], every: list[dict[str, str]]) -> Table:
    table = Table()
    heads = dict(_COLUMNS)
    for name in names:
        table.add_column(heads[name], justify="left" if name in _TEXTS else "right", overflow="fold")
    for row in every:
        table.add_row(*(escape(row[name]) for name in names))
    return table


def notes(record: Record) -> list[str]:
    """What must be known of the table: who was skipped and why, what disturbed the run, and that it was cut short."""
    found = [f"{_who(record, one)} was skipped: {one.left_out}" for one in record.measurements if one.left_out]
    found += record.notes
    if not record.complete:
        found.append("This run was interrupted: the figures are of the turns that it had.")
    return list(dict.fromkeys(found))


def _who(record: Record, one: Measurement) -> str:
    """Of an op the call: what one engine cannot do there, the other mostly cannot either."""
    if record.kind == "op" and one.batch <= len(record.op_cases):
        return record.op_cases[one.batch - 1]
    return one.engine if len(record.batches) == 1 else f"{one.engine} at batch {one.batch}"


def verdict(record: Record) -> str:
    """One sentence: rocm-sd against stock, or what kept it from being compared."""
    if record.kind == "op":
        return _of_calls(record)
    ours = {batch: _ours(record, batch) for batch in record.batches}
    compared = {batch: _comparison(record, one.engine, batch) for batch, one in ours.items() if one is not None}
    found = [c for c in compared.values() if c is not None]
    if found and len(found) == len(ours):
        exact = all(one is not None and one.error is not None and one.stock_error is not None for one in ours.values())
        # Whoever is not as exact as the gate demands was never timed.
        said = f"{_compared(found, several=len(ours) > 1)}{', and is as exact' if exact else ''}"
    else:
        said = "; ".join(_uncompared(record, batch, ours[batch]) for batch in record.batches) or "nothing was timed"
    so_far = "" if record.complete else " so far"
    return f"{record.workload.name} on {record.machine.device}{so_far}: {said}."


def _ours(record: Record, batch: int) -> Measurement | None:
    """The last row of an ablation is rocm-sd as it comes."""
    of_batch = (one for one in record.measurements if one.batch == batch)
    ablation = record.kind == "ablation"
    rows = [one for one in of_batch if one.engine == OURS or (ablation and one.engine != COMPILE)]
    return rows[-1] if rows else None


def _uncompared(record: Record, batch: int, ours: Measurement | None) -> str:
    where = "" if len(record.batches) == 1 else f" at batch {batch}"
    if ours is not None and ours.left_out:
        return f"{ours.engine} was skipped{where}: {shortened(ours.left_out)}"
    timed = [one for one in record.measurements if one.batch == batch and one.ms and not one.left_out]
    if not timed:
        return f"nothing was timed{where}"
    fastest = min(timed, key=lambda one: one.p50_ms)
    return f"{fastest.engine} takes {fastest.p50_ms:.4g} ms{where}, and rocm-sd was not compared with stock"


def _comparison(record: Record, engine: str, batch: int) -> Comparison | None:
    """The first is the one with stock."""
    return next((c for c in record.comparisons if (c.engine, c.batch) == (engine, batch)), None)


def _compared(found: Sequence[Comparison], *, several: bool) -> str:
    first = found[0]
    ours = first.engine if first.engine == OURS else f"{OURS} ({first.engine})"
    against = first.against if first.against == STOCK else f"{STOCK} ({first.against})"
    said = []
    for c in found:
        batch = f" at batch {c.batch}" if several else ""
        interval = f"({' to '.join(_ends(c.low, c.high))}){batch}"
        if c.verdict == "no difference":
            said.append(f"shows no difference from {against} beyond the spread {interval}")
        elif c.verdict == "slower":
            said.append(f"is slower than {against}, {c.ratio:.2f} times its speed {interval}")
        else:
            said.append(f"is {c.ratio:.2f} times as fast as {against} {interval}")
    return f"{ours} {' and '.join(said)}"


def _of_calls(record: Record) -> str:
    found = [c for c in record.comparisons if c.against == STOCK]
    left_out = len({one.batch for one in record.measurements if one.left_out})
    counts = {word: sum(c.verdict == word for c in found) for word in ("faster", "slower", "no difference")}
    said = f"{counts['faster']} of {len(found)} calls are faster than stock's, {counts['slower']} slower"
    said += f", {counts['no difference']} without a difference beyond the spread"
    skipped = f"; {left_out} {'was' if left_out == 1 else 'were'} skipped" if left_out else ""
    return f"{record.workload.name} on {record.machine.device}: {said}{skipped}."
