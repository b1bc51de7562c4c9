"""Memory: the peaks of first and second runs, and memory over time where it was watched."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rocm_sd.bench.records import OURS
from rocm_sd.bench.report.charts import Bar, bars, lines
from rocm_sd.bench.report.parts import Figure, Section, Table, shown
from rocm_sd.bench.report.speed import commands_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rocm_sd.bench.records import Record

__all__ = ["memory"]


def memory(records: Sequence[Record]) -> Section:
    title = "Memory"
    figures: list[Figure] = []
    chosen: list[Record] = []
    for record in (record for record in records if record.kind == "engines"):
        drawn = [_memory_bars(record, batch) for batch in record.batches]
        found = [*(figure for figure in drawn if figure), *_over_time(record)]
        if found:
            chosen.append(record)
        figures += found
    if not figures:
        return Section(
            "memory",
            title,
            missing="No memory was recorded. It is where a record has a GPU, or a system that reports it.",
        )
    lead = (
        "Peak memory of the first picture, compilation and search included, and of the second, which is what stays: "
        "the outline, and the bar in it."
    )
    return Section("memory", title, lead, tuple(figures), commands=commands_of(chosen))


def _memory_bars(record: Record, batch: int) -> Figure | None:
    title = f"{record.workload.name}, batch {batch}, on {record.machine.device}"
    found = [m for m in record.measurements if m.batch == batch and (m.first_run_mib, m.second_run_mib) != (None, None)]
    if not found:
        return None
    drawn = []
    for m in found:
        first, second = m.first_run_mib, m.second_run_mib
        text = f"{shown(second)} MiB" if second is not None else "only a first run"
        text += f" · first {shown(first)}" if first is not None else ""
        kind = "ours" if m.engine == OURS else "other"
        drawn.append(Bar(m.engine, second if second is not None else first, text, kind=kind, outline=first))
    headings = ("engine", "first-run MiB", "second-run MiB", "first picture s")
    rows = [(m.engine, *map(shown, (m.first_run_mib, m.second_run_mib, m.first_picture_s))) for m in found]
    return Figure(title, bars(title, drawn, unit="MiB"), Table.of(title, headings, rows))


def _over_time(record: Record) -> list[Figure]:
    """record.extra["memory_over_time"]: [[seconds, MiB], ...], or one such list for each engine by name."""
    kept = record.extra.get("memory_over_time")
    named: dict[str, Any] = kept if isinstance(kept, dict) else {OURS: kept} if kept else {}
    series = {str(name): points for name, raw in named.items() if (points := _points(raw))}
    if not series:
        return []
    title = f"{record.workload.name} over time, on {record.machine.device}"
    rows = [(name, shown(s), shown(mib)) for name, points in series.items() for s, mib in points]
    return [Figure(title, lines(title, series, unit="MiB"), Table.of(title, ("engine", "seconds", "MiB"), rows))]


def _points(raw: object, most: int = 400) -> list[tuple[float, float]]:
    """At most `most` of them, the highest of each neighbourhood: a peak is never thinned away."""
    if not isinstance(raw, list):
        return []
    points = [
        (float(p[0]), float(p[1]))
        for p in raw
        if isinstance(p, (list, tuple)) and len(p) == 2 and all(isinstance(v, (int, float)) for v in p)
    ]
    points = [p for p in points if math.isfinite(p[0]) and math.isfinite(p[1]) and min(p) >= 0]
    size = -(-len(points) // most) or 1
    return [max(points[n : n + size], key=lambda p: p[1]) for n in range(0, len(points), size)]
