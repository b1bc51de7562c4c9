"""How times are taken and compared: a stopwatch, a warm-up that knows when to end, turns, and an honest interval.

docs/benchmarking.md gives the reasons at length; tests/test_measuring.py shows what the interval is worth.
"""

from __future__ import annotations

import ctypes
import sys
import time
from functools import cache
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rocm_sd import arch
from rocm_sd.comparison import TURNS_FOR_95, Comparison

try:
    import resource
except ImportError:  # Windows has none
    resource = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

__all__ = [
    "LEAST_TURNS",
    "Stopwatch",
    "as_graph",
    "compare",
    "flush_bytes",
    "interleaved",
    "interval",
    "settled",
    "turn",
]

_MIB = 2**20
_UNKNOWN_CACHE = 256 * _MIB
# A wait for an idle GPU takes about 0.01 ms; longer means that the call left work on another stream.
_IDLE_WAIT_MS = 0.2
# Linux gives a process 3 to 4 ms at a time; over calls much longer than that, neighbours cost every engine alike.
_SHORT_MS = 20.0
_TRIES = 4
# A call of several launches is handed over within it.
_HAND_OVER_MS = 0.2
# What is tried until it lasts half of that: from a microsecond at 1 GHz up to as much as ever fits a whole millisecond.
_FIRST_TICKS, _MOST_TICKS = 1000, 2**22
_STEADY = 0.02
_DRAWS = 2000
_SEED = 20260101
# Under the hypothesis of no difference, all of ours are on one side of all of theirs in 2 of 70 runs of four turns, but
# in 2 of 20 runs of three.
LEAST_TURNS = 4
# The least and the greatest of n values bracket the true median with a chance of 1 - 2^(1-n), and no resampling of them
# knows more: eight are the first to reach 99%. In 3000 simulations, draws that should cover 95% covered 93.4 to 94.8%
# from six and seven turns, and 94.5 to 96.4% from eight to twenty.
_LEAST_TURNS_FOR_DRAWS = TURNS_FOR_95


def as_graph(call: Callable[[], Any], device: torch.device) -> tuple[Callable[[], Any], Any]:
    """The call as a captured graph, to be replayed, and its result, which each replay writes anew.

    Ops are timed so on a GPU: the engine replays graphs, and launches do not count.
    """
    call()
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph):
        result = call()
    return graph.replay, result


class Stopwatch:
    """Milliseconds of one call, from its start until the device has done all of it.

    On a GPU by device events, which do not see what the host does before and after; elsewhere by the host's clock. What
    a call leaves running on other streams counts. `cold` overwrites the caches first, outside the time. `queued`: a
    GPU is kept busy until the call is handed over, so that its launches take none of the time: 8 us for a graph, as
    long as a small kernel runs. It is for one op, which a model's graph will hold.

    On a CPU two things are kept out that belong to neither side. The C library is set to keep freed memory, as torch's
    allocator for GPUs does: else it returns it to the system in some processes and not in others, and the same op takes
    0.36 or 1.29 ms. And a call of less than 20 ms from which the system took the processor away (it counts these
    switches) is timed again, up to three times: a neighbour adds its whole time slice, thrice the length of a short op.
    """

    def __init__(self, device: torch.device | str, *, cold: bool = False, queued: bool = False) -> None:
        self.device = torch.device(device)
        self.cold, self.queued = cold, queued
        self._flush = torch.empty(flush_bytes(self.device), dtype=torch.int8, device=self.device) if cold else None
        if self.device.type == "cpu":
            _keep_freed_memory()

    def milliseconds(self, call: Callable[[], object]) -> float:
        if self.device.type != "cpu":
            return self._once(call)
        taken = []
        for _ in range(_TRIES):
            before = _switches()
            taken.append(self._once(call))
            if taken[-1] >= _SHORT_MS or _switches() == before:
                return taken[-1]
        return min(taken)

    def _once(self, call: Callable[[], object]) -> float:
        if self._flush is not None:
            self._flush.fill_(1)
        if self.queued and self.device.type == "cuda":
            with torch.cuda.device(self.device):
                _keep_busy(_hand_over_ticks(self.device))
            return self._by_events(call)
        # Also after the flush: a call that is queued behind it would hide the time of its own launches.
        self._synchronize()
        if self.device.type == "cuda":
            return self._by_events(call)
        started = time.perf_counter()
        call()
        self._synchronize()
        return (time.perf_counter() - started) * 1e3

    def _by_events(self, call: Callable[[], object]) -> float:
        with torch.cuda.device(self.device):
            new_event: Any = torch.cuda.Event
            begin, end = new_event(enable_timing=True), new_event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            elapsed = float(begin.elapsed_time(end))
            waited_from = time.perf_counter()
            torch.cuda.synchronize()
            waited = (time.perf_counter() - waited_from) * 1e3
        return elapsed + waited if waited > _IDLE_WAIT_MS else elapsed

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            module: Any = torch.get_device_module(self.device)
            module.synchronize()


def _keep_busy(ticks: int) -> None:
    torch.cuda._sleep(ticks)  # type: ignore[no-untyped-call]  # noqa: SLF001 -- torch's own tests use it


@cache
def _hand_over_ticks(device: torch.device) -> int:
    """So many ticks of torch's waiting kernel that it lasts a hand-over there.

    A tick is no length of time: on gfx11 the kernel counts a clock of 100 MHz (pytorch/pytorch#197541), elsewhere the
    engine's, which one waiting wave may let fall to a share of that (ROCm/rocm-systems#7667). So it starts with few.
    """
    with torch.cuda.device(device):
        # The first launch loads its code.
        _keep_busy(1)
        torch.cuda.synchronize()
        ticks = _FIRST_TICKS
        while (lasted := _busy_ms(ticks)) < _HAND_OVER_MS / 2 and ticks < _MOST_TICKS:
            ticks *= 4
        # What another program adds to one of them must not make the hand-over too short.
        lasted = min(lasted, *(_busy_ms(ticks) for _ in range(2)))
    return min(_MOST_TICKS, max(1, round(ticks * _HAND_OVER_MS / lasted))) if lasted > 0 else _MOST_TICKS


def _busy_ms(ticks: int) -> float:
    new_event: Any = torch.cuda.Event
    begin, end = new_event(enable_timing=True), new_event(enable_timing=True)
    begin.record()
    _keep_busy(ticks)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def _switches() -> int:
    """How often the system took the processor from a thread of this process that wanted to go on."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


@cache
def _keep_freed_memory() -> None:
    # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h; other C libraries have no mallopt.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(-1, 2**30)
        # Older versions refuse more than 32 MiB.
        mallopt(-3, 2**30) or mallopt(-3, 2**25)


def flush_bytes(device: torch.device) -> int:
    """Twice the last-level cache: one that is not strictly least-recently-used keeps some of what came before."""
    facts = arch.detect(device)
    known = max(facts.llc_bytes or 0, facts.l2_bytes or 0)
    return 2 * known if known else _UNKNOWN_CACHE


def settled(
    call: Callable[[], object],
    stopwatch: Stopwatch,
    *,
    least: int = 3,
    most: int = 20,
    budget_s: float = 20.0,
    before: Sequence[float] = (),
) -> list[float]:
    """Warm up, and return what was seen, which is not to be used as a result. `before`: timings of calls before these.

    It ends when the last three timings agree within 2%, or when their median is within 2% of the median one call
    earlier. A median of three is what one compilation or one capture cannot move, and 2% is below what is called a
    difference anywhere else. Slow drift (heat) is not waited for: the turns of `interleaved` cancel it. The first call
    is not charged to `budget_s`, since it may compile for minutes and says nothing about those that follow.
    """
    seen = list(before)
    spent_from = time.perf_counter()
    while len(seen) < max(most, least):
        if len(seen) >= least and (_is_steady(seen) or time.perf_counter() - spent_from >= budget_s):
            break
        seen.append(stopwatch.milliseconds(call))
        if len(seen) == 1:
            spent_from = time.perf_counter()
    return seen


def _is_steady(seen: Sequence[float]) -> bool:
    if len(seen) < 3:
        return False
    recent = seen[-3:]
    middle = median(recent)
    if max(recent) - min(recent) <= _STEADY * middle:
        return True
    return len(seen) > 3 and abs(median(seen[-4:-1]) - middle) <= _STEADY * middle


def turn(names: Sequence[str], number: int) -> list[str]:
    """The order in turn `number`, from 0: rotated after every second turn, and backwards in every second.

    Rotation alone gives each its share of first places, but nearly always the same predecessor, whose heat and caches
    it inherits. Backwards turns cure that: three names meet in all six orders.
    """
    names = list(names)
    by = number // 2 % len(names) if names else 0
    order = names[by:] + names[:by]
    return order[::-1] if number % 2 else order


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    stopwatch: Stopwatch,
    *,
    repeats: int,
    done: Mapping[str, Sequence[float]] = MappingProxyType({}),
    before: Callable[[str], None] | None = None,
    on_turn: Callable[[str, float], None] | None = None,
) -> dict[str, list[float]]:
    """`repeats` timings of each, in turns, so that what drifts, drifts for all of them alike.

    `done`: timings of the same turns of a run that is resumed; only what is missing is measured. `before` hears of each
    timing before it begins, and `on_turn` at once when it is taken, so nothing is lost when a run is interrupted.
    """
    times = {name: list(done.get(name, ())) for name in calls}
    for number in range(repeats):
        for name in turn(list(calls), number):
            if len(times[name]) <= number:
                if before is not None:
                    before(name)
                taken = stopwatch.milliseconds(calls[name])
                times[name].append(taken)
                if on_turn is not None:
                    on_turn(name, taken)
    return times


def compare(engine: str, against: str, batch: int, ours: Sequence[float], theirs: Sequence[float]) -> Comparison:
    """How many times as fast `ours` is: the ratio of the medians, with the `interval` over whole turns.

    "no difference" while the interval contains 1; while the difference is smaller than the spread, that is the median
    distance of a single turn's ratio from the middle one; and with fewer than four turns, which cannot tell.
    """
    turns = min(len(ours), len(theirs))
    if turns == 0:
        raise ValueError(f"nothing to compare: {engine} has {len(ours)} timings, {against} has {len(theirs)}")
    ours, theirs = ours[:turns], theirs[:turns]
    ratio = median(theirs) / median(ours)
    low, high = interval(ours, theirs)
    each = [their / our for our, their in zip(ours, theirs, strict=True)]
    middle = median(each)
    spread = median(abs(value - middle) for value in each)
    verdict = "no difference"
    if turns >= LEAST_TURNS and abs(ratio - 1) > spread and not low <= 1 <= high:
        verdict = "faster" if ratio > 1 else "slower"
    return Comparison(engine, against, batch, ratio, low, high, verdict)


def interval(ours: Sequence[float], theirs: Sequence[float], *, confidence: float = 0.95) -> tuple[float, float]:
    """Of median(theirs) / median(ours), paired by turn; from fewer than eight turns, the extremes that they allow."""
    if len(ours) < _LEAST_TURNS_FOR_DRAWS:
        return min(theirs) / max(ours), max(theirs) / min(ours)
    outside = (1 - confidence) / 2
    low, high = np.quantile(_draws(ours, theirs), [outside, 1 - outside])
    return float(low), float(high)


def _draws(ours: Sequence[float], theirs: Sequence[float]) -> NDArray[np.float64]:
    """median(theirs) / median(ours) over turns drawn with replacement: both timings of a turn stay together.

    What slows a whole turn (heat, a neighbour) is in both, and leaves the ratio. The seed is fixed: the same timings
    give the same interval everywhere.
    """
    pairs = np.asarray([ours, theirs], dtype=np.float64)
    chosen = np.random.default_rng(_SEED).integers(pairs.shape[1], size=(_DRAWS, pairs.shape[1]))
    medians = np.median(pairs[:, chosen], axis=2)
    return np.asarray(medians[1] / medians[0])
