"""Inline SVG: elements, scales and axes.

Places across are percentages and places down are pixels. A chart is therefore as wide as its column while its text
keeps its size: it reads the same on a phone and on a desk. Colours are classes that the page's style sheet fills in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

__all__ = ["Scale", "Svg", "chart", "label", "line", "tag"]


class Svg(str):
    """Markup that is finished: what it holds was escaped when it was made. Templates take it as it is."""

    __slots__ = ()

    def __html__(self) -> str:
        return self


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
    """The whole: a reader who cannot see it is told the title and the description."""
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
