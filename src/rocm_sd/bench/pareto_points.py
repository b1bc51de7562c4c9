"""What a survey of settings says: each one's speed and nearness, and which no other beats in both."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from rocm_sd.bench.records import STOCK
from rocm_sd.bench.verdict import EQUAL_DB
from rocm_sd.typed_json import is_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rocm_sd.bench.records import Record

__all__ = ["EXACT", "Point", "front", "points"]

# The name of rocm-sd as it comes, whose pictures all others are compared with.
EXACT = "exact"


@dataclass(frozen=True)
class Point:
    """Of a setting: how many times as fast as stock with its interval, and the median PSNR, infinite for equal ones."""

    name: str
    ratio: float
    low: float
    high: float
    psnr: float
    verdict: str
    on_front: bool = False


def points(record: Record) -> list[Point]:
    """Of what was timed and scored, stock and exact first."""
    ratios = {one.engine: one for one in record.comparisons if one.against == STOCK}
    near = _numbers(record.extra.get("near_exact_db"), STOCK)
    found = []
    for one in record.measurements:
        if not one.ms or one.left_out:
            continue
        if one.engine == STOCK:
            found.append(Point(STOCK, 1.0, 1.0, 1.0, _decibels(near), STOCK))
        elif one.engine == EXACT:
            if one.engine in ratios:
                compared = ratios[one.engine]
                found.append(Point(EXACT, compared.ratio, compared.low, compared.high, math.inf, EXACT))
        elif one.quality.is_scored and one.engine in ratios:
            compared = ratios[one.engine]
            psnr = _decibels(one.quality.psnr_db)
            found.append(Point(one.engine, compared.ratio, compared.low, compared.high, psnr, one.quality.verdict))
    best = {point.name for point in front(found)}
    return [replace(point, on_front=point.name in best) for point in found]


def _numbers(kept: Any, name: str) -> tuple[float, ...]:
    """Of a part of a record whose form is not checked."""
    values = kept.get(name) if isinstance(kept, dict) else None
    return tuple(filter(is_number, values)) if isinstance(values, list) else ()


def _decibels(values: Sequence[float]) -> float:
    middle = median(values) if values else math.inf
    return math.inf if middle >= EQUAL_DB else middle


def front(found: Sequence[Point]) -> list[Point]:
    """Those that no other is both as fast as and as near to exact, the fastest first. Stock is what all are compared
    with, and no setting.
    """
    kept: list[Point] = []
    settings = (point for point in found if point.name != STOCK)
    for point in sorted(settings, key=lambda each: (-each.ratio, -each.psnr)):
        if not kept or point.psnr > kept[-1].psnr:
            kept.append(point)
    return kept
