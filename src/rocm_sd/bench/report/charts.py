"""Inline SVG with no library: bars with intervals, a waterfall, a roofline and lines over time.

Places across are percentages and places down are pixels. A chart is therefore as wide as its column while its text
keeps its size: it reads the same on a phone and on a desk. Colours are classes that the page's style sheet fills in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING

from rocm_sd.bench.report.parts import Svg, shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Bar", "Dot", "Scale", "WaterfallRow", "bars", "lines", "roof", "tag", "waterfall"]

ROW, BAR, AXIS, KEY = 46, 14, 30, 22
GUTTER = 10.0  # percent: where the values of an upright axis stand, clear of what is drawn
LONGEST = 30  # characters of a name that fit next to its value on a phone
NARROWEST = 0.3  # percent: a bar of next to nothing is still seen
SHADES = ("dark", "medium", "light")  # of lines that are not ours; a fourth is light, too


def tag(name: str, *children: str, **attributes: object) -> Svg:
    """<name attribute="...">children</name>. Children that are plain text are escaped; None leaves an attribute out.

    `class_` is class and `stroke_width` is stroke-width.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = "".join(child if isinstance(child, Svg) else escape(child) for child in children)
    return Svg(f"<{name}{given}>{inside}</{name}>" if inside else f"<{name}{given}/>")


def _text(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def percent(value: float) -> str:
    return f"{_text(float(value))}%"


def label(text: str, x: float, y: float, class_: str = "", *, anchor: str = "start") -> Svg:
    return tag("text", text, x=percent(x), y=float(y), class_=class_ or None, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Svg:
    return tag("line", x1=percent(x1), y1=float(y1), x2=percent(x2), y2=float(y2), class_=class_)


def chart(title: str, description: str, height: float, *parts: Svg) -> Svg:
    """The whole: a reader who cannot see it hears the title and the description."""
    return tag(
        "svg",
        tag("title", title),
        tag("desc", description),
        *parts,
        class_="chart",
        role="img",
        aria_label=f"{title}. {description}",
        width="100%",
        height=float(height),
    )


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high` as places from `start` to `end`, linear or logarithmic."""

    low: float
    high: float
    start: float = 0.0
    end: float = 100.0
    log: bool = False

    def __post_init__(self) -> None:
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError(f"no scale runs from {self.low} to {self.high}")

    def __call__(self, value: float) -> float:
        low, high, at = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def ticks(self, about: int = 5) -> tuple[float, ...]:
        """Round values inside: powers of ten on a logarithmic scale, else steps of 1, 2 or 5."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            every = max(1, math.ceil((last - first + 1) / (about + 2)))
            return tuple(10.0**power for power in range(first, last + 1, every))
        rough = (self.high - self.low) / about
        magnitude = 10.0 ** math.floor(math.log10(rough))
        step = next(size * magnitude for size in (1, 2, 5, 10) if size * magnitude >= rough * 0.999)
        count = math.floor(self.high / step + 1e-9)
        return tuple(n * step for n in range(math.ceil(self.low / step - 1e-9), count + 1))


@dataclass(frozen=True)
class Bar:
    """`value` None: nothing was measured. `kind`: "ours", "other" or "undecided". `outline`: a value behind it."""

    name: str
    value: float | None
    text: str
    low: float | None = None
    high: float | None = None
    kind: str = "other"
    outline: float | None = None


@dataclass(frozen=True)
class WaterfallRow:
    """From what it was before to what it is. `decided` is false inside the spread.

    Without `before` a row stands for itself.
    """

    name: str
    before: float | None
    after: float
    text: str
    decided: bool = True


@dataclass(frozen=True)
class Dot:
    """One call: FLOP per byte across, TFLOP/s up."""

    intensity: float
    tflops: float
    kind: str
    text: str


def _bar(x: float, row: float, width: float, class_: str, title: str) -> Svg:
    wide = percent(max(width, NARROWEST))
    return tag("rect", tag("title", title), x=percent(x), y=row + 22, width=wide, height=BAR, rx=2, class_=class_)


def _round(value: float) -> str:
    """As an axis has it: 0.01, 1, 2.5, 1000."""
    return f"{value:g}" if abs(value) < 1e6 else f"{value:.0e}"


def _name_and_text(row: Bar | WaterfallRow, y: float, class_: str) -> list[Svg]:
    name = row.name if len(row.name) <= LONGEST else row.name[: LONGEST - 1] + "…"
    return [label(name, 0, y + 15, class_), label(row.text, 100, y + 15, "value", anchor="end")]


def _across(scale: Scale, bottom: float, top: float | None = None, unit: str = "") -> list[Svg]:
    """Values under the chart, with lines up to `top`. The unit stands once, at the last value."""
    parts = []
    ticks = scale.ticks()
    for number, value in enumerate(ticks):
        x = scale(value)
        anchor = "start" if x < 3 else "end" if x > 96 else "middle"
        words = _round(value) + (f" {unit}" if unit and number == len(ticks) - 1 else "")
        parts += [line(x, top, x, bottom, "grid")] if top is not None else []
        parts.append(label(words, x, bottom + 18, "tick", anchor=anchor))
    return parts


def _up(scale: Scale, about: int = 5) -> list[Svg]:
    return [
        part
        for value in scale.ticks(about)
        for part in (
            line(GUTTER, scale(value), 100, scale(value), "grid"),
            label(_round(value), GUTTER - 1.5, scale(value) + 4, "tick", anchor="end"),
        )
    ]


def _units(top: float, bottom: float, up: str, across: str) -> list[Svg]:
    return [label(up, 0, top - 10, "axis"), label(across, 100, bottom + 38, "axis", anchor="end")]


def _described(title: str, rows: Sequence[Bar | WaterfallRow], bottom: float, parts: list[Svg]) -> Svg:
    return chart(title, "; ".join(f"{row.name}: {row.text}" for row in rows), bottom + AXIS, *parts)


def bars(title: str, rows: Sequence[Bar], *, unit: str, mark: tuple[float, str] | None = None) -> Svg:
    """One bar a row, its name and its value above it, its interval as a whisker; `mark` is a line to compare with."""
    top = 22.0 if mark else 4.0
    bottom = top + ROW * len(rows)
    values = [value or 0 for row in rows for value in (row.high, row.value, row.outline)]
    scale = Scale(0.0, (max([*values, mark[0] if mark else 0]) or 1.0) * 1.04)
    parts = _across(scale, bottom, top, unit)
    if mark:
        at = scale(mark[0])
        parts += [line(at, top - 6, at, bottom, "mark")]
        parts += [label(mark[1], at, top - 10, "tick", anchor="start" if at < 50 else "end")]
    for number, row in enumerate(rows):
        y = top + ROW * number
        parts += _name_and_text(row, y, f"name {row.kind}")
        if row.value is None:
            parts.append(line(0, y + 29, 100, y + 29, "absent"))
            continue
        if row.outline is not None:
            parts.append(_bar(0, y, scale(row.outline), "bar outline", f"{row.name}: {row.text}"))
        parts.append(_bar(0, y, scale(row.value), f"bar {row.kind}", f"{row.name}: {row.text}"))
        if row.low is not None and row.high is not None:
            low, high, middle = scale(row.low), scale(row.high), y + 22 + BAR / 2
            parts += [line(low, middle, high, middle, "whisker")]
            parts += [line(end, middle - 4, end, middle + 4, "whisker") for end in (low, high)]
    return _described(title, rows, bottom, parts)


def waterfall(title: str, rows: Sequence[WaterfallRow], *, unit: str) -> Svg:
    """What each row took away stands in colour at the end of what is left."""
    top = 4.0
    bottom = top + ROW * len(rows)
    scale = Scale(0.0, max(max(row.after, row.before or 0) for row in rows) * 1.04)
    parts = _across(scale, bottom, top, unit)
    for number, row in enumerate(rows):
        y = top + ROW * number
        parts += _name_and_text(row, y, "name")
        before = row.after if row.before is None else row.before
        least = scale(min(row.after, before))
        parts.append(_bar(0, y, least, "bar other", f"{row.name}: {shown(row.after)} {unit}"))
        if row.before is not None:
            kind = "undecided" if not row.decided else "ours" if row.after <= before else "worse"
            width = scale(max(row.after, before)) - least
            parts.append(_bar(least, y, width, f"bar {kind}", f"{row.name}: {row.text}"))
        if number + 1 < len(rows) and rows[number + 1].before is not None:
            parts.append(line(scale(row.after), y + 22 + BAR, scale(row.after), y + ROW + 22, "thread"))
    return _described(title, rows, bottom, parts)


def roof(
    title: str, dots: Sequence[Dot], *, peak_tflops: float | None, bandwidth_gbps: float | None, height: float = 420
) -> Svg:
    """Both axes logarithmic. Under the slope memory is the limit, under the flat line arithmetic is."""
    top, bottom = 24.0, height - 44
    reached = [dot.tflops for dot in dots]
    across = [dot.intensity for dot in dots]
    ridge = peak_tflops * 1e3 / bandwidth_gbps if peak_tflops and bandwidth_gbps else None
    # The bend is always in the picture, with something of the slope before it.
    bend = [ridge / 4, ridge] if ridge else []
    x = Scale(min([*across, *bend]) / 2, max([*across, *bend]) * 3, GUTTER, log=True)
    y = Scale(min(reached) / 2, max([*reached, peak_tflops or 0]) * 2, bottom, top, log=True)
    parts = [*_across(x, bottom, top), *_up(y), *_units(top, bottom, "TFLOP/s", "FLOP per byte")]
    if ridge and peak_tflops and bandwidth_gbps:
        # Where the slope enters the picture: at its left edge, or at its foot.
        start = max(x.low, y.low * 1e3 / bandwidth_gbps)
        parts += [
            line(x(start), y(start * bandwidth_gbps / 1e3), x(ridge), y(peak_tflops), "roof"),
            line(x(ridge), y(peak_tflops), 100, y(peak_tflops), "roof"),
            label(f"{shown(peak_tflops)} TFLOP/s", 100, y(peak_tflops) - 8, "value", anchor="end"),
            label(f"{shown(bandwidth_gbps)} GB/s", max(x(ridge) - 4, 0), y(peak_tflops) - 8, "value", anchor="end"),
        ]
    for dot in dots:
        cx, cy, r = percent(x(dot.intensity)), y(dot.tflops), 3.5 if dot.kind == "ours" else 3.0
        parts.append(tag("circle", tag("title", dot.text), cx=cx, cy=cy, r=r, class_=f"dot {dot.kind}"))
    limit = f", roof {shown(peak_tflops)} TFLOP/s and {shown(bandwidth_gbps)} GB/s" if ridge else ", no roof known"
    described = f"{len(dots)} points from {shown(min(reached))} to {shown(max(reached))} TFLOP/s{limit}"
    return chart(title, described, height, *parts)


def lines(title: str, series: Mapping[str, Sequence[tuple[float, float]]], *, unit: str, height: float = 300) -> Svg:
    """Values over seconds. The names stand below: lines of one height would run through them."""
    top, bottom = 24.0, height - 44
    every = [point for points in series.values() for point in points]
    x = Scale(0.0, max((seconds for seconds, _ in every), default=0.0) or 1.0, GUTTER)
    y = Scale(0.0, (max((value for _, value in every), default=0.0) or 1.0) * 1.1, bottom, top)
    parts = [*_up(y, 4), *_across(x, bottom), *_units(top, bottom, unit, "seconds")]
    described = []
    for number, (name, points) in enumerate(series.items()):
        kind = "ours" if name == "rocm-sd" else SHADES[min(number, len(SHADES) - 1)]
        parts += [line(x(a[0]), y(a[1]), x(b[0]), y(b[1]), f"trace {kind}") for a, b in pairwise(points)]
        highest = max(points, key=lambda point: point[1])
        key = f"{name}: highest {shown(highest[1])} {unit}"
        described.append(f"{key} after {shown(highest[0])} s")
        row = height + KEY * number
        parts += [line(GUTTER, row, GUTTER + 5, row, f"trace {kind}"), label(key, GUTTER + 7, row + 4, f"name {kind}")]
    return chart(title, "; ".join(described), height + KEY * len(series), *parts)
