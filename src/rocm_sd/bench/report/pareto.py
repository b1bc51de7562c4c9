"""Speed against quality: the settings of a survey as points, and the front among them."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

from rocm_sd.bench import pareto_tables as tables
from rocm_sd.bench.pareto_points import front, points
from rocm_sd.bench.report.charts import chart, label, line, percent, tag
from rocm_sd.bench.report.pareto_plot import LEGEND, Box, frame, place
from rocm_sd.bench.report.parts import Figure, Section, Table, times
from rocm_sd.bench.report.speed import commands_of
from rocm_sd.quality.budget import BUDGETS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rocm_sd.bench.pareto_points import Point
    from rocm_sd.bench.records import Record
    from rocm_sd.bench.report.parts import Svg

__all__ = ["pareto", "scatter"]

# Labels are placed for a column this wide, with letters of this width, in pixels.
_WIDE, _LETTER, _HEIGHT = 760.0, 7.2, 460.0


def pareto(records: Sequence[Record]) -> Section | None:
    chosen = [record for record in records if record.kind == "pareto"]
    if not chosen:
        return None
    figures = []
    for record in chosen:
        found = points(record)
        every = tables.rows(record)
        heading, conditions = tables.title(record)
        best = [number for number, row in enumerate(every) if row[-1]]
        table = Table.of(heading, tables.HEADINGS, every, text=(0, 2, 3, 6, 7, 8), marked=best)
        drawn = scatter(heading, found) if len(found) > 1 else None
        notes = (f"{conditions}; {record.when[:10]}.", *tables.notes(record), LEGEND)
        figures.append(Figure(heading, drawn, table, notes, folded=drawn is not None))
    lead = (
        "How many times as fast as stock a setting is, across, and how near its pictures are to the exact ones, up. "
        "The line is the front: nothing here is both faster and nearer. Dashed are the budgets' least PSNR."
    )
    return Section("pareto", "Speed against quality", lead, tuple(figures), commands=commands_of(chosen))


def scatter(title: str, found: Sequence[Point]) -> Svg:
    area = Box(0.1 * _WIDE, 26, _WIDE, _HEIGHT - 44)
    placing = frame(found, area)
    x = {point.name: 100 * placing.at(point)[0] / _WIDE for point in found}
    y = {point.name: placing.at(point)[1] for point in found}
    parts: list[Svg] = []
    for value in placing.x.ticks():
        at = 100 * placing.x(value) / _WIDE
        parts += [line(at, area.top, at, area.bottom, "grid"), label(f"{value:g}", at, area.bottom + 18, "tick")]
    for value in placing.y.ticks(6):
        parts.append(line(10, placing.y(value), 100, placing.y(value), "grid"))
        parts.append(label(f"{value:g}", 8.5, placing.y(value) + 4, "tick", anchor="end"))
    parts.append(label("equal", 8.5, placing.equal + 4, "tick", anchor="end"))
    for name, budget in BUDGETS.items():
        parts.append(line(10, placing.y(budget.psnr), 100, placing.y(budget.psnr), "mark"))
        parts.append(label(name, 100, placing.y(budget.psnr) - 6, "tick", anchor="end"))
    parts += [
        label("median PSNR, dB", 0, area.top - 12, "axis"),
        label("times as fast as stock", 100, area.bottom + 38, "axis", anchor="end"),
    ]
    for one, other in pairwise(front(found)):
        parts.append(line(x[one.name], y[one.name], x[other.name], y[other.name], "trace ours"))
    boxes = place(
        [placing.at(point) for point in found],
        [(len(point.name) * _LETTER + 4, 16.0) for point in found],
        area,
        [Box(px - 6, py - 6, px + 6, py + 6) for px, py in map(placing.at, found)],
        9,
    )
    for point, box in zip(found, boxes, strict=True):
        said = _said(point)
        kind = "ours" if point.on_front else "other"
        low, high = (100 * end / _WIDE for end in placing.whisker(point))
        parts.append(line(low, y[point.name], high, y[point.name], "thread"))
        circle = {"cx": percent(x[point.name]), "cy": y[point.name], "r": 5.0, "class_": f"dot {kind}"}
        parts.append(tag("circle", tag("title", said), **circle))
        middle = 100 * (box.left + box.right) / 2 / _WIDE
        parts.append(label(point.name, middle, box.bottom - 4, f"name {kind}", anchor="middle"))
    return chart(title, "; ".join(map(_said, found)), _HEIGHT, *parts)


def _said(point: Point) -> str:
    near = "equal" if math.isinf(point.psnr) else f"{point.psnr:.1f} dB"
    return f"{point.name}: {times(point.ratio)}, {near}, {point.verdict}" + (", on the front" if point.on_front else "")
