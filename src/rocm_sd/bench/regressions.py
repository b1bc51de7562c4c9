"""What has become worse between two records of one workload. docs/benchmarking.md gives the rules and reasons."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from rocm_sd.bench.records import STOCK
from rocm_sd.errors import RocmSdError
from rocm_sd.measuring import LEAST_TURNS, interval

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rocm_sd.bench.records import Measurement, Record

__all__ = ["Incomparable", "Regression", "incomparable", "regressions"]

# `regressions` gives the reasons for these three.
CONFIDENCE = 0.99
MARGIN = 0.03
MARGIN_WITHOUT_STOCK = 0.10
MEMORY_MARGIN, MEMORY_MARGIN_MIB = 0.02, 16.0
# A CPU's memory is the resident set, which the C library's heap moves: 105 to 128 MiB in 15 runs of one build.
HOST_MEMORY_MARGIN, HOST_MEMORY_MARGIN_MIB = 0.5, 64.0
ERROR_FACTOR = 2.0
# Relative errors below this are the order of float32 additions: an engine that is exact today may round tomorrow.
ERROR_FLOOR = 1e-6


@dataclass(frozen=True)
class Regression:
    """`what` went from `before` to `now`, which is `ratio` times as much, and worse; `low` and `high` bound it.

    `what` and its unit: "time against stock" (a ratio of times), "time" (ms), "second-run memory" (MiB), "error", or
    "skipped: REASON", where `now` and `ratio` are infinite.
    """

    engine: str
    batch: int
    what: str
    before: float
    now: float
    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        where = f"{self.engine}, batch {self.batch}"
        if math.isinf(self.now):
            return f"{where}: {self.what} (it took {self.before:.4g} ms before)"
        unit = {"time": " ms", "second-run memory": " MiB"}.get(self.what, "")
        sure = f", surely {self.low:.3f} to {self.high:.3f}" if self.low != self.high else ""
        return f"{where}: {self.what} {self.before:.4g}{unit} -> {self.now:.4g}{unit} ({self.ratio:.3f} times{sure})"


class Incomparable(RocmSdError):
    """Two records that say nothing about each other."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"The two records cannot be compared: {why}.",
            hint="Run the workload of the older record again, with its options, on the same machine.",
        )


def incomparable(before: Record, now: Record) -> str | None:
    """Why two records say nothing about each other, in words; None where they do.

    Versions may differ, and so may the driver: what a new one does to the times is a thing to be caught.
    """
    then, today = before.workload, now.workload
    facts = [
        ("kind", before.kind, now.kind),
        ("workload", then.name, today.name),
        ("model", then.model, today.model),
        ("picture size", f"{then.width}x{then.height}", f"{today.width}x{today.height}"),
        ("steps", then.steps, today.steps),
        ("scheduler", then.scheduler, today.scheduler),
        ("guidance", then.guidance, today.guidance),
        ("dtype", then.dtype, today.dtype),
        ("device", before.machine.device, now.machine.device),
        ("architecture", before.machine.arch, now.machine.arch),
        # A virtual machine or a container may have a part of a processor, or of an MI300.
        ("number of compute units", before.machine.compute_units, now.machine.compute_units),
    ]
    for name, old, new in facts:
        if old != new:
            return f"the {name} was {old} and is {new}"
    pairs = list(_pairs(before, now))
    if not pairs:
        return "they have no engine and batch size in common that was timed before"
    turns = [min(len(old.ms), len(new.ms)) for old, new in pairs if new.ms]
    if turns and max(turns) < LEAST_TURNS:
        return f"there are {max(turns)} turns, and fewer than {LEAST_TURNS} cannot tell a difference from noise"
    return None


def regressions(before: Record, now: Record) -> tuple[Regression, ...]:
    """Of every engine and batch size that was timed before and is in the new record; none of the yardstick itself.

    Time. Between two runs a machine drifts: clocks, heat, neighbours. Stock runs in turns with the others and drifts
    with them, so an engine's time over stock's is compared, each in its own run. But stock drifts by itself as well: it
    waits for the host far more than a captured graph does. So an engine has become slower when

    - its time over stock's is more than 3% worse, and the 99% intervals of before and now do not touch; and
    - its own time is more than 3% worse.

    99% and not 95%, since a record has many comparisons: with 95%, 19 of 2700 simulated pairs of unchanged records with
    six comparisons each were alarms. 3%, since an interval knows the noise within its run only, and not what differs
    between runs for their whole length: where memory lies, which algorithm a library picked. And both times: of 1900
    pairs of runs of an unchanged op, from 20 processes on a busy machine, 84 were alarms by stock alone, 158 by the
    op's own time, none by both.

    Without stock in both runs the engine's own time is all there is, and the margin is 10%, since the drift is in it.
    That is not enough on a busy machine (64 of those 1900): run with stock.

    Memory of the second run does not vary: more than 2%, and more than 16 MiB (torch's allocator gives large tensors
    segments of 20 MiB, and which tensors share one may differ). That of a CPU does: half as much again, and more than
    64 MiB. Error: more than twice as large. And what was timed
    before and is skipped now is a regression, whatever the reason.
    """
    reason = incomparable(before, now)
    if reason is not None:
        raise Incomparable(reason)
    yardstick = _yardstick(before, now)
    found: list[Regression] = []
    for old, new in _pairs(before, now):
        if old.engine == yardstick:
            continue
        if new.left_out:
            took = median(old.ms)
            what = f"skipped: {new.left_out}"
            found.append(Regression(new.engine, new.batch, what, took, math.inf, math.inf, math.inf, math.inf))
        elif min(len(old.ms), len(new.ms)) >= LEAST_TURNS:
            old_stock = before.measurement(yardstick, old.batch) if yardstick else None
            new_stock = now.measurement(yardstick, new.batch) if yardstick else None
            found += _slower(old, new, old_stock, new_stock)
        if not new.left_out:
            found += _larger(old, new, on_host=now.machine.arch == "cpu")
            # Which weights makes no difference to the times, but all to the error.
            found += _less_exact(old, new) if before.workload.weights == now.workload.weights else ()
    return tuple(found)


def _slower(
    old: Measurement, new: Measurement, old_stock: Measurement | None, new_stock: Measurement | None
) -> Iterator[Regression]:
    own_ratio = median(new.ms) / median(old.ms)
    if old_stock and new_stock and min(len(old_stock.ms), len(new_stock.ms)) >= LEAST_TURNS:
        what, margin = "time against stock", MARGIN
        before, now = _against(old.ms, old_stock.ms), _against(new.ms, new_stock.ms)
    else:
        what, margin = "time", MARGIN_WITHOUT_STOCK
        before, now = _against(old.ms, (1.0,) * len(old.ms)), _against(new.ms, (1.0,) * len(new.ms))
    (then, then_low, then_high), (today, today_low, today_high) = before, now
    ratio = today / then
    if min(ratio, own_ratio) > 1 + margin and today_low > then_high:
        bounds = today_low / then_high, today_high / then_low
        yield Regression(new.engine, new.batch, what, then, today, ratio, *bounds)


def _against(ours: Sequence[float], stock: Sequence[float]) -> tuple[float, float, float]:
    """The ratio of the medians, and the interval's ends."""
    turns = min(len(ours), len(stock))
    ours, stock = ours[:turns], stock[:turns]
    return median(ours) / median(stock), *interval(stock, ours, confidence=CONFIDENCE)


def _larger(old: Measurement, new: Measurement, *, on_host: bool) -> Iterator[Regression]:
    before, now = old.second_run_mib, new.second_run_mib
    share, mib = (HOST_MEMORY_MARGIN, HOST_MEMORY_MARGIN_MIB) if on_host else (MEMORY_MARGIN, MEMORY_MARGIN_MIB)
    if before and now and now > before * (1 + share) and now > before + mib:
        ratio = now / before
        yield Regression(new.engine, new.batch, "second-run memory", before, now, ratio, ratio, ratio)


def _less_exact(old: Measurement, new: Measurement) -> Iterator[Regression]:
    before, now = old.error, new.error
    if before is None or now is None:
        return
    # Written so that a NaN, too, is worse.
    if not now <= ERROR_FACTOR * max(before, ERROR_FLOOR):
        ratio = now / max(before, ERROR_FLOOR)
        yield Regression(new.engine, new.batch, "error", before, now, ratio, ratio, ratio)


def _yardstick(before: Record, now: Record) -> str | None:
    """Stock, or the first row of an ablation, which is stock whatever it is called; None where a record has neither."""
    for name in (STOCK, *(before.engines[:1] if before.kind == "ablation" else ())):
        if name in before.engines and name in now.engines:
            return name
    return None


def _pairs(before: Record, now: Record) -> Iterator[tuple[Measurement, Measurement]]:
    """What was timed before, with its successor. Cases of an op are known by their text: their numbers may change."""
    for old in before.measurements:
        batch = _same_case(before, now, old.batch) if before.kind == "op" else old.batch
        new = None if batch is None else now.measurement(old.engine, batch)
        if old.ms and new is not None:
            yield old, new


def _same_case(before: Record, now: Record, number: int) -> int | None:
    case = before.op_cases[number - 1] if 0 < number <= len(before.op_cases) else None
    return now.op_cases.index(case) + 1 if case in now.op_cases else None
