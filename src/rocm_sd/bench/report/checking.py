"""Whether a record holds what its dataclasses declare. JSON does not hold to it, and records come from strangers."""

from __future__ import annotations

import math
import types
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from rocm_sd.bench.records import Comparison, Machine, Measurement, Record, UnreadableRecord, WorkloadFacts

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["check", "is_number"]

_KINDS = ("engines", "ablation", "op")
_VERDICTS = ("faster", "slower", "no difference")
_NEVER_NEGATIVE = (
    "first_picture_s", "warm_up_s", "first_run_mib", "second_run_mib", "power_watt", "clock_mhz", "floor_ms", "card_ms",
    "error", "stock_error",
)  # fmt: skip


# Parts of a record that are dataclasses are looked at by themselves.
_NESTED = ("workload", "machine", "measurements", "comparisons")
_HINTS: dict[type, dict[str, Any]] = {
    declared: {name: hint for name, hint in get_type_hints(declared).items() if name not in _NESTED}
    for declared in (Record, WorkloadFacts, Machine, Measurement, Comparison)
}


def is_number(value: object) -> bool:
    """JSON as Python reads it has NaN and Infinity, and True is an int: none of them is a measurement."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check(record: Record, path: Path) -> None:
    """Raises `UnreadableRecord`, which names the file and the value, or returns."""

    def require(met: bool, sentence: str) -> None:
        if not met:
            raise UnreadableRecord(path, sentence)

    parts: tuple[Any, ...] = (record, record.workload, record.machine, *record.measurements, *record.comparisons)
    for part in parts:
        for name, hint in _HINTS[type(part)].items():
            value = getattr(part, name)
            require(_fits(value, hint), f"{name} of its {type(part).__name__.lower()} is {value!r:.60}")
    require(record.kind in _KINDS, f"its kind is {record.kind!r}")
    for m in record.measurements:
        where = f"{m.engine!r} at batch {m.batch}"
        require(m.batch >= 1 and m.steps >= 1, f"the batch or the steps of {where} are not a count")
        require(all(ms > 0 for ms in m.ms), f"a timing of {where} is not positive")
        require(
            bool(m.ms) or m.left_out is not None or not record.complete, f"{where} has neither timings nor a reason"
        )
        require(not (m.ms and m.left_out), f"{where} was left out and has timings")
        require(_not_negative(m), f"a figure of {where} is negative")
    for c in record.comparisons:
        where = f"{c.engine!r} against {c.against!r}"
        require(0 < c.low <= c.high and c.ratio > 0, f"the interval of {where} is inside out or no ratio")
        require(c.verdict in _VERDICTS, f"the verdict of {where} is {c.verdict!r}")
    if record.kind == "op":
        described = all(m.batch <= len(record.op_cases) for m in record.measurements)
        require(described, "a case of an op is not described")


def _not_negative(m: Measurement) -> bool:
    return all(getattr(m, name) is None or getattr(m, name) >= 0 for name in _NEVER_NEGATIVE)


def _fits(value: object, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in {Union, types.UnionType}:
        return any(_fits(value, one) for one in inner)
    if hint in {float, int}:
        return is_number(value) and (hint is float or isinstance(value, int))
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(one, inner[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(k, inner[0]) and _fits(v, inner[1]) for k, v in value.items())
    return isinstance(value, hint)
