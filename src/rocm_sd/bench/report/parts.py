"""What a page is made of: sections with figures, each with its plain table and the command that repeats it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "Figure", "Headline", "MachineFacts", "Page", "Picture", "Section", "Svg", "Table", "ratio_words",
    "shown", "times",
]  # fmt: skip


class Svg(str):
    """Markup that is finished: what it holds was escaped when it was made. Templates take it as it is."""

    __slots__ = ()

    def __html__(self) -> str:
        return self


@dataclass(frozen=True)
class Table:
    """Cells are text. `right` are the columns of figures; `marked` the rows that the eye should find first."""

    caption: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[int] = frozenset()
    marked: frozenset[int] = frozenset()
    label: str | None = None

    @classmethod
    def of(
        cls,
        caption: str,
        headings: Iterable[str],
        rows: Iterable[Iterable[object]],
        *,
        text: Iterable[int] = (0,),
        marked: Iterable[int] = (),
        label: str | None = None,
    ) -> Table:
        """Every column is one of figures but those named in `text`. A column with no value in any row is dropped."""
        names = tuple(headings)
        cells = [tuple("" if cell is None else str(cell) for cell in row) for row in rows]
        kept = [place for place in range(len(names)) if any(row[place] for row in cells)]
        words = set(text)
        return cls(
            caption,
            tuple(names[place] for place in kept),
            tuple(tuple(row[place] for place in kept) for row in cells),
            frozenset(number for number, place in enumerate(kept) if place not in words),
            frozenset(marked),
            label,
        )


@dataclass(frozen=True)
class Figure:
    """A chart, a table, or both. `folded` tables wait behind a line that opens them: the chart comes first."""

    title: str
    chart: Svg | None = None
    table: Table | None = None
    notes: tuple[str, ...] = ()
    folded: bool = True
    label: str | None = None


@dataclass(frozen=True)
class Picture:
    """`data` is a data: address, so that the page needs no other file."""

    data: str
    caption: str
    width: int
    height: int


@dataclass(frozen=True)
class Section:
    """`missing` is the sentence that stands in place of figures where there are no data."""

    id: str
    title: str
    lead: str = ""
    figures: tuple[Figure, ...] = ()
    pictures: tuple[tuple[Picture, ...], ...] = ()
    commands: tuple[str, ...] = ()
    missing: str | None = None


@dataclass(frozen=True)
class Headline:
    """One ratio in large type, and the sentence that says what it is."""

    figure: str
    sentence: str
    detail: str
    verdict: str = "faster"


@dataclass(frozen=True)
class MachineFacts:
    """A machine, as pairs of a word and a value."""

    title: str
    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Page:
    title: str
    subtitle: str
    headlines: tuple[Headline, ...]
    cards: tuple[MachineFacts, ...]
    notes: tuple[str, ...]
    sections: tuple[Section, ...]
    version: str = ""
    send_to: str = ""


def shown(value: float | None) -> str:
    """Three significant figures, as a reader writes them: 1689, 41.9, 8.17, 0.0014. None is nothing."""
    if value is None or not math.isfinite(value):
        return ""
    size = abs(value)
    if size == 0:
        return "0"
    if size < 0.001:
        return f"{value:.2e}"
    places = 0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.9995 else 2 - math.floor(math.log10(size))
    return f"{value:.{places}f}"


def ratio_words(ratio: float) -> str:
    """Two places: a ratio of 0.997 in three places reads as more than it is."""
    return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.1f}"


def times(ratio: float) -> str:
    return f"{ratio_words(ratio)}×"  # noqa: RUF001 -- the sign of multiplication is meant
