"""The four kinds of chart: bars with intervals, a waterfall, a roofline and lines over time."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from rocm_sd.bench.report.parts import shown
from rocm_sd.bench.report.svg import Scale, Svg, chart, label, line, percent, tag

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Bar", "Dot", "Step", "bars", "lines", "roof", "waterfall"]

ROW, BAR, AXIS, KEY = 46, 14, 30, 22
GUTTER = 10.0  # percent: where the values of an upright axis stand, clear of what is drawn
LONGEST = 30  # characters of a name that fit beside its value on a phone
NARROWEST = 0.3  # percent: a bar of next to nothing is still seen
SHADES = ("dark", "medium", "light")  # of lines that are not ours; a fourth is light, too


@dataclass(frozen=True)
class Bar:
    """`value` None: nothing was measured. `kind`: "ours", "other" or "undecided". `outline`: a value behind it."""

    name: str
    value: float | None
    told: str
    low: float | None = None
    high: float | None = None
    kind: str = "other"
    outline: float | None = None


def _bar(x: float, y: float, width: float, class_: str, told: str, height: float = BAR) -> Svg:
    return tag(
        "rect",
        tag("title", told),
        x=percent(x),
        y=float(y),
        width=percent(max(width, NARROWEST)),
        height=float(height),
        rx=2,
        class_=class_,
    )


def _round(value: float) -> str:
    """As an axis has it: 0.01, 1, 2.5, 1000."""
    return f"{value:g}" if abs(value) < 1e6 else f"{value:.0e}"


def _name(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _upright(value: float, y: float) -> Svg:
    return label(_round(value), GUTTER - 1.5, y + 4, "tick", anchor="end")


def _axis(scale: Scale, top: float, bottom: float, unit: str) -> list[Svg]:
    parts = []
    ticks = scale.ticks()
    for number, value in enumerate(ticks):
        x = scale(value)
        anchor = "start" if x < 3 else "end" if x > 96 else "middle"
        # The unit stands once, at the last value.
        words = _round(value) + (f" {unit}" if unit and number == len(ticks) - 1 else "")
        parts += [line(x, top, x, bottom, "grid"), label(words, x, bottom + 18, "tick", anchor=anchor)]
    return parts


def bars(title: str, rows: Sequence[Bar], *, unit: str, mark: tuple[float, str] | None = None) -> Svg:
    """One bar a row, its name and its value above it, its interval as a whisker; `mark` is a line to compare with."""
    top = 22.0 if mark else 4.0
    bottom = top + ROW * len(rows)
    most = (
        max(
            [max(row.high or 0, row.value or 0, row.outline or 0) for row in rows] + ([mark[0]] if mark else []),
            default=0,
        )
        or 1.0
    )
    scale = Scale(0.0, most * 1.04)
    parts = _axis(scale, top, bottom, unit)
    if mark:
        parts += [line(scale(mark[0]), top - 6, scale(mark[0]), bottom, "mark")]
        parts += [label(mark[1], scale(mark[0]), top - 10, "tick", anchor="start" if scale(mark[0]) < 50 else "end")]
    for number, row in enumerate(rows):
        y = top + ROW * number
        parts += [
            label(_name(row.name), 0, y + 15, f"name {row.kind}"),
            label(row.told, 100, y + 15, "value", anchor="end"),
        ]
        if row.value is None:
            parts.append(line(0, y + 29, 100, y + 29, "absent"))
            continue
        if row.outline is not None:
            parts.append(_bar(0, y + 22, scale(row.outline), "bar outline", f"{row.name}: {row.told}"))
        parts.append(_bar(0, y + 22, scale(row.value), f"bar {row.kind}", f"{row.name}: {row.told}"))
        if row.low is not None and row.high is not None:
            low, high, middle = scale(row.low), scale(row.high), y + 22 + BAR / 2
            parts += [line(low, middle, high, middle, "whisker")]
            parts += [line(end, middle - 4, end, middle + 4, "whisker") for end in (low, high)]
    told = "; ".join(f"{row.name}: {row.told}" for row in rows)
    return chart(title, told, bottom + AXIS, *parts)


@dataclass(frozen=True)
class Step:
    """One row of a waterfall: from what it was before to what it is. `decided` is false inside the spread.

    Without `before` a row stands for itself.
    """

    name: str
    before: float | None
    after: float
    told: str
    decided: bool = True


def waterfall(title: str, steps: Sequence[Step], *, unit: str) -> Svg:
    """What each row took away stands in colour at the end of what is left."""
    top = 4.0
    bottom = top + ROW * len(steps)
    scale = Scale(0.0, max(max(step.after, step.before or 0) for step in steps) * 1.04)
    parts = _axis(scale, top, bottom, unit)
    for number, step in enumerate(steps):
        y = top + ROW * number
        parts += [label(_name(step.name), 0, y + 15, "name"), label(step.told, 100, y + 15, "value", anchor="end")]
        before = step.after if step.before is None else step.before
        least = min(step.after, before)
        parts.append(_bar(0, y + 22, scale(least), "bar other", f"{step.name}: {shown(step.after)} {unit}"))
        if step.before is not None:
            kind = "undecided" if not step.decided else "ours" if step.after <= before else "worse"
            width = scale(max(step.after, before)) - scale(least)
            parts.append(_bar(scale(least), y + 22, width, f"bar {kind}", f"{step.name}: {step.told}"))
        if number + 1 < len(steps) and steps[number + 1].before is not None:
            parts.append(line(scale(step.after), y + 22 + BAR, scale(step.after), y + ROW + 22, "thread"))
    return chart(title, "; ".join(f"{s.name}: {s.told}" for s in steps), bottom + AXIS, *parts)


@dataclass(frozen=True)
class Dot:
    """One call: FLOP per byte across, TFLOP/s up."""

    intensity: float
    tflops: float
    kind: str
    told: str


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
    parts = []
    for value in x.ticks():
        anchor = "start" if x(value) < 3 else "end" if x(value) > 97 else "middle"
        parts += [
            line(x(value), top, x(value), bottom, "grid"),
            label(_round(value), x(value), bottom + 18, "tick", anchor=anchor),
        ]
    for value in y.ticks():
        parts += [line(GUTTER, y(value), 100, y(value), "grid"), _upright(value, y(value))]
    parts += [label("TFLOP/s", 0, top - 10, "axis"), label("FLOP per byte", 100, bottom + 38, "axis", anchor="end")]
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
        parts.append(
            tag(
                "circle",
                tag("title", dot.told),
                cx=percent(x(dot.intensity)),
                cy=y(dot.tflops),
                r=3.5 if dot.kind == "ours" else 3.0,
                class_=f"dot {dot.kind}",
            )
        )
    limit = f", roof {shown(peak_tflops)} TFLOP/s and {shown(bandwidth_gbps)} GB/s" if ridge else ", no roof known"
    described = f"{len(dots)} points from {shown(min(reached))} to {shown(max(reached))} TFLOP/s{limit}"
    return chart(title, described, height, *parts)


def lines(title: str, series: Mapping[str, Sequence[tuple[float, float]]], *, unit: str, height: float = 300) -> Svg:
    """Values over seconds. The names stand below: lines of one height would run through them."""
    top, bottom = 24.0, height - 44
    every = [point for points in series.values() for point in points]
    x = Scale(0.0, max((seconds for seconds, _ in every), default=0.0) or 1.0, GUTTER)
    y = Scale(0.0, (max((value for _, value in every), default=0.0) or 1.0) * 1.1, bottom, top)
    parts = []
    for value in y.ticks(4):
        parts += [line(GUTTER, y(value), 100, y(value), "grid"), _upright(value, y(value))]
    for value in x.ticks():
        anchor = "start" if x(value) < 3 else "end" if x(value) > 97 else "middle"
        parts.append(label(_round(value), x(value), bottom + 18, "tick", anchor=anchor))
    parts += [label(unit, 0, top - 10, "axis"), label("seconds", 100, bottom + 38, "axis", anchor="end")]
    told = []
    for number, (name, points) in enumerate(series.items()):
        kind = "ours" if name == "rocm-sd" else SHADES[min(number, len(SHADES) - 1)]
        parts += [line(x(a[0]), y(a[1]), x(b[0]), y(b[1]), f"trace {kind}") for a, b in pairwise(points)]
        highest = max(points, key=lambda point: point[1])
        told.append(f"{name}: highest {shown(highest[1])} {unit} after {shown(highest[0])} s")
        row = height + KEY * number
        parts += [
            line(GUTTER, row, GUTTER + 5, row, f"trace {kind}"),
            label(f"{name}: highest {shown(highest[1])} {unit}", GUTTER + 7, row + 4, f"name {kind}"),
        ]
    return chart(title, "; ".join(told), height + KEY * len(series), *parts)
