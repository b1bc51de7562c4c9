"""The plot of speed against quality as a picture: no library but Pillow, and no label on another."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont

from rocm_sd.bench.pareto_points import EXACT, front
from rocm_sd.bench.records import STOCK
from rocm_sd.bench.report.charts import Scale
from rocm_sd.quality.budget import BUDGETS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rocm_sd.bench.pareto_points import Point

__all__ = ["LEGEND", "Box", "Frame", "draw", "frame", "place"]

LEGEND = (
    "1/4: one step of 4 computes all layers. e: extrapolated between. g: guidance as often. d3: depth 3, else 1. "
    "Bars: interval of the times, cut at the edge."
)
_WIDTH, _HEIGHT = 1200, 760
# Drawn larger and made smaller: Pillow's lines have no soft edges.
_FINER = 3
_LABEL = 16
# From so far on a line leads to a label.
_FAR = 24
_LEFT, _RIGHT, _TOP, _BOTTOM = 86, 40, 116, 108
_PAPER, _INK, _SOFT, _GRID = "#ffffff", "#1b1a19", "#66625d", "#e4e1dc"
_SHADES = {"high": "#eaf3ec", "balanced": "#f6f1e1"}
_COLOURS = {"within high": "#1d7f45", "within balanced": "#b07a06", "outside of both": "#b3261e"}
_FRONT = "#c2361b"


@dataclass(frozen=True)
class Box:
    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: Box) -> float:
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.bottom, other.bottom) - max(self.top, other.top)
        return wide * high if wide > 0 and high > 0 else 0.0

    def distance(self, x: float, y: float) -> float:
        """Of a point from its nearest edge; none inside."""
        return math.hypot(max(self.left - x, 0, x - self.right), max(self.top - y, 0, y - self.bottom))

    def inside(self, other: Box) -> bool:
        return (
            other.left <= self.left
            and self.right <= other.right
            and other.top <= self.top
            and self.bottom <= other.bottom
        )


@dataclass(frozen=True)
class Frame:
    """Where a point lies. `equal`: the height of pictures that are the exact ones, above all numbers."""

    x: Scale
    y: Scale
    equal: float
    area: Box

    def whisker(self, point: Point) -> tuple[float, float]:
        return max(self.x(point.low), self.area.left), min(self.x(point.high), self.area.right)

    def at(self, point: Point) -> tuple[float, float]:
        return self.x(point.ratio), self.equal if math.isinf(point.psnr) else self.y(point.psnr)


def frame(found: Sequence[Point], area: Box) -> Frame:
    """Numbers end below a strip for what is equal."""
    finite = [point.psnr for point in found if math.isfinite(point.psnr)]
    lowest = min([*finite, *(budget.psnr for budget in BUDGETS.values())]) - 2.5
    highest = max([*finite, max(budget.psnr for budget in BUDGETS.values())]) + 3.0
    least = min(1.0, *(point.low for point in found))
    # An interval of few turns may be many times as wide as all points are apart: it is cut at the edge.
    most = max(1.5, min(max(point.high for point in found), 1.6 * max(point.ratio for point in found)))
    margin = 0.06 * (most - least)
    x = Scale(max(least - margin, 0.0), most + 1.4 * margin, area.left, area.right)
    y = Scale(max(lowest, 0.0), highest, area.bottom, area.top + 46)
    return Frame(x, y, area.top + 22, area)


def place(
    anchors: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    area: Box,
    taken: Sequence[Box],
    gap: float,
) -> list[Box]:
    """A box for the label of each anchor: near it, inside of the area, and on no other label, nor on what is taken."""
    placed: list[Box] = []
    for (x, y), (wide, high) in zip(anchors, sizes, strict=True):
        others = [other for other in anchors if other != (x, y)]
        best, least = Box(x, y, x + wide, y + high), math.inf
        for ring, number in itertools.product((1.0, 1.4, 1.9, 2.8, 4.0, 5.6, 7.5), range(32)):
            turn = 2 * math.pi * number / 32
            middle_x = x + math.cos(turn) * (gap * ring + wide / 2)
            middle_y = y - math.sin(turn) * (gap * ring + high / 2)
            box = Box(middle_x - wide / 2, middle_y - high / 2, middle_x + wide / 2, middle_y + high / 2)
            covered = sum(box.overlap(other) for other in (*placed, *taken))
            # Near is better than far, above better than below, and nearer to its own point than to another's.
            mistaken = any(box.distance(*other) <= 1.3 * box.distance(x, y) for other in others)
            cost = 40 * covered + 30 * (ring - 1) - 12 * math.sin(turn) + 90 * mistaken
            cost += 0 if box.inside(area) else 1e6
            if cost < least:
                best, least = box, cost
        placed.append(best)
    return placed


class _Pen:
    """Coordinates of the finished picture; text of its sizes."""

    def __init__(self, size: tuple[int, int]) -> None:
        self.image = Image.new("RGB", (size[0] * _FINER, size[1] * _FINER), _PAPER)
        self._draw = ImageDraw.Draw(self.image)

    def font(self, size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
        return ImageFont.load_default(size=size * _FINER)

    def width(self, text: str, size: int) -> float:
        return self.font(size).getlength(text) / _FINER

    def text(self, x: float, y: float, words: str, size: int, colour: str, anchor: str = "la") -> None:
        self._draw.text((x * _FINER, y * _FINER), words, fill=colour, font=self.font(size), anchor=anchor)

    def line(self, ends: Sequence[tuple[float, float]], colour: str, width: float) -> None:
        self._draw.line([(x * _FINER, y * _FINER) for x, y in ends], fill=colour, width=round(width * _FINER))

    def rectangle(self, box: Box, colour: str) -> None:
        self._draw.rectangle([v * _FINER for v in (box.left, box.top, box.right, box.bottom)], fill=colour)

    def dot(self, x: float, y: float, radius: float, fill: str, outline: str) -> None:
        ends = [(x - radius) * _FINER, (y - radius) * _FINER, (x + radius) * _FINER, (y + radius) * _FINER]
        self._draw.ellipse(ends, fill=fill, outline=outline, width=2 * _FINER)

    def dashed(self, y: float, left: float, right: float, colour: str) -> None:
        for start in range(round(left), round(right), 10):
            self.line([(start, y), (min(start + 5, right), y)], colour, 1)

    def finished(self) -> Image.Image:
        size = (self.image.width // _FINER, self.image.height // _FINER)
        return self.image.resize(size, Image.Resampling.LANCZOS)


def draw(found: Sequence[Point], title: str, subtitle: str) -> Image.Image:
    """Times stock across, median PSNR up; budgets shaded, the front as a line, every point with its name."""
    area = Box(_LEFT, _TOP, _WIDTH - _RIGHT, _HEIGHT - _BOTTOM)
    placing = frame(found, area)
    pen = _Pen((_WIDTH, _HEIGHT))
    pen.text(_LEFT, 18, title, 24, _INK)
    pen.text(_LEFT, 52, subtitle, 16, _SOFT)
    _ground(pen, placing)
    best = [placing.at(point) for point in front(found)]
    if len(best) > 1:
        pen.line(best, _FRONT, 2)
    taken = _along(best)
    for point in found:
        x, y = placing.at(point)
        colour = _colour(point)
        low, high = placing.whisker(point)
        pen.line([(low, y), (high, y)], colour, 1)
        pen.dot(x, y, 7, colour if point.on_front else _PAPER, colour)
        taken += [Box(x - 9, y - 9, x + 9, y + 9), Box(low, y - 2, high, y + 2)]
    taken += _budgets(pen, placing, taken)
    anchors = [placing.at(point) for point in found]
    sizes = [(pen.width(point.name, _LABEL) + 4, _LABEL + 2.0) for point in found]
    for point, box, (x, y) in zip(found, place(anchors, sizes, area, taken, 11), anchors, strict=True):
        if box.distance(x, y) > _FAR:
            nearest = min(max(x, box.left), box.right), min(max(y, box.top), box.bottom)
            pen.line([(x, y), nearest], _SOFT, 1)
        pen.text((box.left + box.right) / 2, (box.top + box.bottom) / 2, point.name, _LABEL, _colour(point), "mm")
    _key(pen, found)
    return pen.finished()


def _colour(point: Point) -> str:
    return _COLOURS.get(point.verdict, _INK)


def _along(ends: Sequence[tuple[float, float]]) -> list[Box]:
    """Small boxes on the front's line, which labels keep clear of."""
    found = []
    for (x1, y1), (x2, y2) in itertools.pairwise(ends):
        parts = max(2, round(math.hypot(x2 - x1, y2 - y1) / 6))
        for part in range(parts + 1):
            x, y = x1 + (x2 - x1) * part / parts, y1 + (y2 - y1) * part / parts
            found.append(Box(x - 2, y - 2, x + 2, y + 2))
    return found


def _ground(pen: _Pen, placing: Frame) -> None:
    area = placing.area
    above = area.top
    for name, budget in BUDGETS.items():
        edge = placing.y(budget.psnr)
        pen.rectangle(Box(area.left, above, area.right, edge), _SHADES[name])
        above = edge
    for value in placing.x.ticks(8):
        x = placing.x(value)
        pen.line([(x, area.top), (x, area.bottom)], _GRID, 1)
        pen.text(x, area.bottom + 8, f"{value:g}", 15, _SOFT, "ma")
    for value in placing.y.ticks(7):
        y = placing.y(value)
        pen.line([(area.left, y), (area.right, y)], _GRID, 1)
        pen.text(area.left - 10, y, f"{value:g}", 15, _SOFT, "rm")
    for budget in BUDGETS.values():
        pen.dashed(placing.y(budget.psnr), area.left, area.right, _SOFT)
    pen.dashed(placing.y.end - 4, area.left, area.right, _GRID)
    pen.text(area.left - 10, placing.equal, "equal", 15, _SOFT, "rm")
    pen.text((area.left + area.right) / 2, area.bottom + 32, "times as fast as stock", 16, _INK, "ma")
    pen.text(_LEFT, area.top - 24, "median PSNR to the exact pictures, dB", 16, _INK)


def _budgets(pen: _Pen, placing: Frame, taken: Sequence[Box]) -> list[Box]:
    """What each budget asks for, there on its edge where it covers least, rather at an end."""
    found = []
    for name, budget in BUDGETS.items():
        words = f"{name}: {budget.psnr:g} dB or more, SSIM {budget.ssim:g} or more"
        edge, wide = placing.y(budget.psnr), pen.width(words, 14)
        room = placing.area.right - placing.area.left - wide - 16
        lefts = [placing.area.left + 8 + room * part / 8 for part in (0, 8, 1, 7, 2, 6, 3, 5, 4)]
        boxes = [Box(left, edge - 22, left + wide, edge) for left in lefts]
        box = min(boxes, key=lambda end: sum(end.overlap(other) for other in taken))
        pen.text(box.left, edge - 20, words, 14, _SOFT)
        found.append(box)
    return found


def _key(pen: _Pen, found: Sequence[Point]) -> None:
    x, y = float(_LEFT), _HEIGHT - 38.0
    shown = [name for name in _COLOURS if any(point.verdict == name for point in found)]
    for name in shown:
        pen.dot(x + 6, y, 6, _COLOURS[name], _COLOURS[name])
        pen.text(x + 20, y, name, 15, _INK, "lm")
        x += 20 + pen.width(name, 15) + 26
    pen.line([(x, y), (x + 26, y)], _FRONT, 2)
    pen.text(x + 34, y, "Pareto front (filled)", 15, _INK, "lm")
    if any(point.name not in {STOCK, EXACT, *BUDGETS} for point in found):
        pen.text(_LEFT, _HEIGHT - 14, LEGEND, 13, _SOFT, "lm")
