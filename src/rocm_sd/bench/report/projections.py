"""Cards that were not at hand: modelled, and labelled so in every row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rocm_sd.bench.projection import rows as rows_of
from rocm_sd.bench.report.parts import MODELLED, Figure, Section, Table, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rocm_sd.bench.records import Record

__all__ = ["projection"]


def projection(records: Sequence[Record]) -> Section | None:
    """record.extra["projection"], or the model's rows of the workload: plain values, each labelled as modelled."""
    figures = []
    for record in {record.workload.name: record for record in records}.values():
        found = record.extra.get("projection", rows_of(record.workload.name))
        rows = [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []
        if not rows:
            continue
        rows = [row | {"error of the model": _model_error(row)} for row in rows]
        plain = dict.fromkeys(
            name for row in rows for name, value in row.items() if not isinstance(value, (dict, list))
        )
        names = [str(name) for name in plain if name != "label"]
        title = f"{record.workload.name} on cards that were not at hand"
        cells = [[*(_plain(row.get(name)) for name in names), MODELLED] for row in rows]
        words = [n for n, name in enumerate(names) if any(isinstance(row.get(name), str) for row in rows)]
        table = Table.of(
            title, [*(name.replace("_", " ") for name in names), "kind"], cells, text=[*words, len(names)],
            label=MODELLED,
        )  # fmt: skip
        figures.append(Figure(title, None, table, folded=False, label=MODELLED))
    if not figures:
        return None
    lead = (
        "Modelled, not measured: FLOPs, bytes and efficiencies measured on another card, put through the figures of "
        "these. docs/projection.md has the formula and what it leaves out."
    )
    return Section("projection", "Projected to other cards", lead, tuple(figures))


def _model_error(row: dict[str, Any]) -> str | None:
    """In the words of the projection, or from its figures."""
    deviation = row.get("deviation")
    if isinstance(deviation, dict) and _plain(deviation.get("as_used")):
        return f"{_plain(deviation['as_used'])}% on the card that was timed"
    told = row.get("told_error")
    return str(told) if told else None


def _plain(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "" if value is None else str(value)
    return str(value) if isinstance(value, int) else shown(value)
