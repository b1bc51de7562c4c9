"""Several GPUs as they were measured: each way's speed, what the plan gains and sends, and efficiency by cards beside
the modelled curve of the same plan, where there is one for the card.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from rocm_sd.bench import several_gpus_tables as tables
from rocm_sd.bench.records import OURS, STOCK
from rocm_sd.bench.report.charts import GUTTER, KEY, Scale, chart, label, line, percent, tag
from rocm_sd.bench.report.parts import Figure, Section, Table, ratio_words, shown
from rocm_sd.bench.report.scaling import modelled
from rocm_sd.bench.several_gpus_record import TOGETHER
from rocm_sd.measuring import compare, interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rocm_sd.bench.report.parts import Svg
    from rocm_sd.bench.several_gpus_record import GpusRecord, Way
    from rocm_sd.comparison import Comparison
    from rocm_sd.parallel.scaling import Prediction

__all__ = ["efficiency", "several_gpus"]

_TOP, _HEIGHT = 24.0, 300.0
_MEASURED, _MODELLED = "measured", "modelled"
# Cards that an axis has at least, and how many of its values fit on a phone.
_LEAST_CARDS, _MOST_TICKS = 8, 9
_PLAN = re.compile(r"[a-z]{1,20}=[0-9]{1,6}(,[a-z]{1,20}=[0-9]{1,6}){0,4}")
_COLUMNS = (
    "drawn by", "ranks", "ms a turn", "interval", "pictures/s", "times stock", "times one rank", "efficiency",
    "sent a picture", "error", "stock's error", "note",
)  # fmt: skip
# Ratios with their intervals stay on one line, as figures do: the table scrolls in its box.
_TEXTS = (0, 11)


@dataclass(frozen=True)
class _Point:
    """Efficiency on so many cards, with its interval."""

    cards: int
    at: float
    low: float
    high: float


def several_gpus(records: Sequence[GpusRecord]) -> Section | None:
    if not records:
        return None
    figures = [_curve(some) for some in _by_plan(records)]
    figures += [_figures(record) for record in records]
    lead = (
        "Measured: stock and rocm-sd on one rank, and rocm-sd on all of them, in turns of one run. Efficiency is how "
        "many times as fast all ranks are as one, divided by their number. A filled point is measured, with its "
        "interval; a dashed line is modelled, for the same plan on the same kind of card."
    )
    commands = tuple(dict.fromkeys(record.command for record in records if record.command))
    return Section("gpus", "More than one GPU, measured", lead, tuple(filter(None, figures)), commands=commands)


def _by_plan(records: Sequence[GpusRecord]) -> list[list[GpusRecord]]:
    """Those that differ in their ranks alone are one curve."""
    found: dict[str, list[GpusRecord]] = {}
    for record in records:
        facts, machine = record.workload, record.machine
        key = repr((facts, machine.device, machine.arch, _strategies(record)))
        found.setdefault(key, []).append(record)
    return list(found.values())


def _strategies(record: GpusRecord) -> str:
    """cfg x patch, of "cfg=2,patch=2"; a plan that is none is its own name."""
    if not _PLAN.fullmatch(record.plan):
        return record.plan
    return " x ".join(part.partition("=")[0] for part in record.plan.split(","))


def _curve(records: Sequence[GpusRecord]) -> Figure | None:
    points = [point for point in map(_point, records) if point is not None]
    if not points:
        return None
    first = records[0]
    name, facts = _strategies(first), first.workload
    title = f"{facts.name} by {name} on {first.machine.device}: efficiency by number of ranks"
    model, line_ = modelled(facts.name, first.machine.arch, name)
    rows: list[list[object]] = [
        [each.cards, f"{each.at:.2f}", f"{each.low:.2f} to {each.high:.2f}", _MEASURED] for each in points
    ]
    rows += [[each.cards, f"{each.efficiency:.2f}", "", f"{_MODELLED}, {model}"] for each in line_ if each.cards > 1]
    table = Table.of(title, ("ranks", "efficiency", "interval", "kind"), rows, text=(3,))
    note = (
        f"The line is modelled for {model}, and rests on what stands at the tables of the modelled part."
        if line_ else f"Nothing is modelled for {facts.name} by {name} on {first.machine.arch}."
    )  # fmt: skip
    shared = (tables.SHARED_CORES,) if first.machine.arch == "cpu" else ()
    return Figure(title, efficiency(title, points, line_, model), table, (note, *shared))


def _point(record: GpusRecord) -> _Point | None:
    gain = _gain(record, TOGETHER, OURS)
    together = record.way(TOGETHER)
    if gain is None or together is None:
        return None
    ranks = together.ranks
    return _Point(ranks, gain.ratio / ranks, gain.low / ranks, gain.high / ranks)


def _gain(record: GpusRecord, name: str, against: str) -> Comparison | None:
    ours, theirs = record.way(name), record.way(against)
    if ours is None or theirs is None or not ours.ms or not theirs.ms or ours is theirs:
        return None
    return compare(name, against, record.pictures, ours.ms, theirs.ms)


def efficiency(title: str, points: Sequence[_Point], line_: Sequence[Prediction] = (), model: str = "") -> Svg:
    """Ranks across, by doubling; efficiency up, measured as points and modelled as a line."""
    bottom = _HEIGHT - 44
    most = max(_LEAST_CARDS, *(each.cards for each in points))
    line_ = [each for each in line_ if each.cards <= most]
    x = Scale(1, most, GUTTER, 96.0, log=True)
    y = Scale(0.0, max(1.0, *(each.high * 1.04 for each in points)), bottom, _TOP)
    parts: list[Svg] = []
    for value in y.ticks(5):
        parts.append(line(GUTTER, y(value), 100, y(value), "grid"))
        parts.append(label(f"{value:g}", GUTTER - 1.5, y(value) + 4, "tick", anchor="end"))
    doubled = [2**power for power in range(most.bit_length())]
    every = -(-len(doubled) // _MOST_TICKS)
    parts += [label(str(cards), x(cards), bottom + 18, "tick", anchor="middle") for cards in doubled[::every]]
    parts += [label("efficiency", 0, _TOP - 10, "axis"), label("ranks", 100, bottom + 38, "axis", anchor="end")]
    for a, b in pairwise(line_):
        ends = {"x1": percent(x(a.cards)), "y1": y(a.efficiency), "x2": percent(x(b.cards)), "y2": y(b.efficiency)}
        parts.append(tag("line", **ends, class_="trace dark", stroke_dasharray="7 4"))
    for each in line_:
        said = f"{_MODELLED} for {model}, {each.cards} cards: {each.efficiency:.2f}"
        parts.append(_dot(x(each.cards), y(each.efficiency), 3.0, "other", said))
    for point in points:
        said = f"{_MEASURED}, {point.cards} ranks: {point.at:.2f}, {point.low:.2f} to {point.high:.2f}"
        at, low, high = x(point.cards), y(point.low), y(point.high)
        parts.append(line(at, low, at, high, "whisker"))
        parts += [line(at - 0.6, end, at + 0.6, end, "whisker") for end in (low, high)]
        parts.append(_dot(at, y(point.at), 4.5, "ours", said))
    # The plan is in the title, and every point in the table: on a phone a key has room for one of them.
    last_point = max(points, key=lambda each: each.cards)
    keys = [f"{_MEASURED}: {last_point.at:.2f} on {last_point.cards}"]
    parts += [_dot(GUTTER + 2.5, _HEIGHT, 4.5, "ours", keys[0]), label(keys[0], GUTTER + 7, _HEIGHT + 4, "name ours")]
    if line_:
        last = line_[-1]
        keys.append(f"{_MODELLED}: {last.efficiency:.2f} on {last.cards}")
        row = _HEIGHT + KEY
        ends = {"x1": percent(GUTTER), "y1": row, "x2": percent(GUTTER + 5), "y2": row}
        parts += [tag("line", **ends, class_="trace dark", stroke_dasharray="7 4")]
        parts += [label(keys[1], GUTTER + 7, row + 4, "name")]
    return chart(title, "; ".join(keys), _HEIGHT + KEY * len(keys), *parts)


def _dot(x: float, y: float, r: float, kind: str, said: str) -> Svg:
    return tag("circle", tag("title", said), cx=percent(x), cy=y, r=r, class_=f"dot {kind}")


def _figures(record: GpusRecord) -> Figure:
    """Every way a row. A turn is a picture, or as many as there are ranks with `data`."""
    title = tables.heading(record)
    one = record.pictures == 1
    headings = [name.replace("turn", "picture") if one else name for name in _COLUMNS]
    rows = [_row(record, way) for way in record.ways]
    marked = [number for number, way in enumerate(record.ways) if way.name == TOGETHER and way.ms]
    table = Table.of(title, headings, rows, text=_TEXTS, marked=marked)
    return Figure(title, None, table, tables.notes(record), folded=False)


def _row(record: GpusRecord, way: Way) -> list[object]:
    errors = [None if value is None else f"{value:.2e}" for value in (way.error, way.stock_error)]
    # Whatever else a record may hold: no speed is shown where there is a reason not to.
    if way.left_out or not way.ms:
        return [way.name, way.ranks, *[None] * 7, *errors, f"no speed: {way.left_out or 'not timed'}"]
    found, (low, high) = median(way.ms), interval([1.0] * len(way.ms), way.ms)
    # One rank of ours against one of ours is no gain.
    stock = _gain(record, way.name, STOCK) if way.name != STOCK else None
    one = _gain(record, way.name, OURS) if way.name == TOGETHER else None
    efficient = f"{one.ratio / way.ranks:.2f}" if one is not None else None
    sent = None
    if way.name == TOGETHER:
        sent = ", ".join(f"{tables.in_bytes(each)} for {name}" for name, each in record.sent.items()) or "nothing"
    return [
        way.name, way.ranks, shown(found), f"{shown(low)} to {shown(high)}", shown(record.pictures * 1e3 / found),
        _said(stock), _said(one), efficient, sent, *errors, None,
    ]  # fmt: skip


def _said(gain: Comparison | None) -> str | None:
    if gain is None:
        return None
    return f"{ratio_words(gain.ratio)}, {gain.low:.2f} to {gain.high:.2f}: {gain.verdict}"
