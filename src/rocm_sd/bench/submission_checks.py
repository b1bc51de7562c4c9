"""Figures that cannot be, or that nobody can stand behind: what keeps a record out of the performance database."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_sd import arch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rocm_sd.bench.records import Comparison, Measurement, Record

__all__ = ["GATE", "LEAST_TURNS", "implausible"]

# Of three turns no difference can be told from chance.
LEAST_TURNS = 4
# An engine's error may be this many times stock's, as in every benchmark of this project.
GATE = 1.5
# A card may clock above its data sheet, and an engine may need fewer operations than were counted: convolutions after
# an enlargement as four small ones leave 0.65 of a VAE's.
_ABOVE_PEAK = 2.0
# A comparison is of paired turns, the measurements of all of them: medians differ a little.
_RATIO_APART = 1.25
_OWN_REFERENCE = {"stock"}


def implausible(record: Record) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*_of_record(record), *_of_measurements(record), *_of_comparisons(record)]))


def _of_record(record: Record) -> Iterator[str]:
    if not record.complete:
        yield "the run was not finished"
    if not arch.get(record.machine.arch).known:
        yield f"the architecture {record.machine.arch} is not known here"
    if record.workload.name.endswith("-tiny"):
        yield "it is a trial with a small model, not a measurement"
    if not any(measured.ms for measured in record.measurements):
        yield "nothing was timed"
    if record.kind != "op" and record.measurements and not record.comparisons and len(record.engines) > 1:
        yield "engines were timed side by side, and not compared"


def _of_measurements(record: Record) -> Iterator[str]:
    seen = set()
    for measured in record.measurements:
        name = f"{measured.engine} at batch {measured.batch}"
        if (measured.engine, measured.batch) in seen:
            yield f"{name} is there twice"
        seen.add((measured.engine, measured.batch))
        if not measured.ms:
            if measured.left_out is None:
                yield f"{name} has no timings, and does not say why"
            continue
        yield from (f"{name} {problem}" for problem in _of_one(record, measured))


def _of_one(record: Record, measured: Measurement) -> Iterator[str]:
    if len(measured.ms) < LEAST_TURNS:
        yield f"was timed {len(measured.ms)} times, and {LEAST_TURNS} are the least"
    if measured.floor_ms is not None and measured.p50_ms < measured.floor_ms:
        yield f"is faster than its own floor of {measured.floor_ms:.3g} ms"
    least = _least_ms(record, measured)
    if least is not None and measured.p50_ms < least:
        yield f"takes {measured.p50_ms:.3g} ms, and the arithmetic alone takes {least:.3g} ms on this card"
    if measured.error is None:
        if measured.engine not in _OWN_REFERENCE:
            yield "was timed, and its result was compared with nothing"
    elif measured.stock_error is not None and measured.error > GATE * measured.stock_error:
        yield f"has an error of {measured.error:.2g}, more than {GATE} times stock's {measured.stock_error:.2g}"


def _least_ms(record: Record, measured: Measurement) -> float | None:
    """By the table's peak for as many compute units as the card has; None where either is not known."""
    card = arch.get(record.machine.arch)
    peak = card.peak(record.workload.dtype)
    if record.kind == "op" or record.workload.flops is None or peak is None or not card.compute_units:
        return None
    units = record.machine.compute_units or card.compute_units
    rate = peak * 1e12 * units / card.compute_units
    return record.workload.flops * measured.batch / rate / _ABOVE_PEAK * 1e3


def _of_comparisons(record: Record) -> Iterator[str]:
    for compared in record.comparisons:
        name = f"{compared.engine} against {compared.against} at batch {compared.batch}"
        yield from (f"{name}: {problem}" for problem in _of_comparison(record, compared))


def _of_comparison(record: Record, compared: Comparison) -> Iterator[str]:
    if not compared.low <= compared.ratio <= compared.high:
        yield f"the interval {compared.low:.3g} to {compared.high:.3g} does not hold the ratio {compared.ratio:.3g}"
    if compared.verdict != "no difference" and compared.low <= 1 <= compared.high:
        yield f"it is called {compared.verdict}, and the interval contains 1"
    if (compared.verdict == "faster" and compared.ratio < 1) or (compared.verdict == "slower" and compared.ratio > 1):
        yield f"it is called {compared.verdict}, and the ratio is {compared.ratio:.3g}"
    ours = record.measurement(compared.engine, compared.batch)
    theirs = record.measurement(compared.against, compared.batch)
    if ours is None or theirs is None or not ours.ms or not theirs.ms:
        yield "one of the two was not timed"
        return
    ratio = theirs.p50_ms / ours.p50_ms
    if not 1 / _RATIO_APART <= compared.ratio / ratio <= _RATIO_APART:
        yield f"the ratio is {compared.ratio:.3g}, and the timings say {ratio:.3g}"
