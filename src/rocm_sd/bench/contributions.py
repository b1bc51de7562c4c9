"""The files of contributions/, of either kind: what `rocm-sd contribute` wrote, and single records of bench."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rocm_sd.bench import card_report, submission
from rocm_sd.bench.records import UnreadableRecord
from rocm_sd.plain_json import read_json

if TYPE_CHECKING:
    from pathlib import Path

    from rocm_sd.bench.card_report import CardReport
    from rocm_sd.bench.records import Record

__all__ = ["arch_of", "load", "validate"]


def _is_card_report(path: Path) -> bool:
    try:
        values = read_json(path, partial(UnreadableRecord, path), finite=False)
    except UnreadableRecord:
        return False
    return isinstance(values, dict) and values.get("format") == card_report.FORMAT


def validate(path: Path) -> tuple[str, ...]:
    """What is wrong with a file, in words; nothing if it can be listed."""
    return card_report.validate(path) if _is_card_report(path) else submission.validate(path)


def load(path: Path) -> tuple[CardReport | None, tuple[Record, ...]]:
    """The report of a card, where it is one, and the records of bench that it holds. `validate` comes first."""
    if not _is_card_report(path):
        return None, (submission.load(path),)
    report = card_report.load(path)
    return report, report.records(path)


def arch_of(path: Path) -> str:
    """The folder that the file belongs into."""
    report, records = load(path)
    return report.machine.arch if report is not None else records[0].machine.arch
