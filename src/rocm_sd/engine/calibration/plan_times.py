"""Whole plans of a model, timed by a worker that rebuilds it from its shapes, and stored."""

from __future__ import annotations

import logging
import math
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from statistics import median
from typing import IO, TYPE_CHECKING, Any

from rocm_sd.engine.calibration import trials
from rocm_sd.engine.calibration.plans import CUT, OP, PLANS, kernels_hash, known_wrong, problem_of
from rocm_sd.engine.calibration.subjects import CannotBeRebuilt, NotMeasured
from rocm_sd.engine.memory import free_memory
from rocm_sd.measuring import interval
from rocm_sd.ops.registry import forget_choices
from rocm_sd.tuning import environment
from rocm_sd.tuning.choice import STOCK
from rocm_sd.tuning.entries import Entry, now
from rocm_sd.tuning.location import default_path
from rocm_sd.tuning.resolve import user_database
from rocm_sd.tuning.search import workbench
from rocm_sd.workers import OutOfTime, Pool, WorkerFailed

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    import torch

    from rocm_sd.engine.calibration.plans import Plan
    from rocm_sd.engine.calibration.subjects import Outline
    from rocm_sd.engine.calibration.trials import Prepare
    from rocm_sd.workers import Worker

    _Answers = dict[str, dict[str, Any]]  # by plan: milliseconds, or why there are none

__all__ = ["Clock", "PlanTimer", "alone", "timing_plans"]

log = logging.getLogger("rocm_sd")

_THOROUGH_S = 60.0  # for the plans of each model, where nobody waits for a picture
_DECISIVE = 2  # plans, of all that are wanted: stock, and the one that changes most
# The least that a plan takes where all is compiled: so many seconds, and calls of the model.
_PLAN_S, _CALLS_OF_A_PLAN = 0.5, 25
# For one plan: it is captured, and what was not compiled before is; and not less than for so many calls of the model.
# One that takes longer hangs.
_TRIAL_S, _CALLS_OF_A_TRIAL = 10.0, 60
_STOCK_S = 600.0  # for stock, which comes first: a library may search at the first calls of each size
# First calls of stock that take longer have a library at its search. The first picture would wait for it in any case,
# and no budget of ours ends it.
_REBUILT_S = 6.0
_IMPORT_S = 300.0
# Bytes that are free, and so many times the weights: then both workers may have the card open, one with the model.
_ROOM_FOR_TWO, _ROOM_OF_A_MODEL = 4 * 2**30, 4
_ASKS_AGAIN_S = 0.2


class Clock:
    """The end of a calibration, which only a library's own search moves; and the seconds of its phases."""

    def __init__(self, budget_s: float) -> None:
        self.begun = time.monotonic()
        self.budget_s = budget_s
        self.phases: dict[str, float] = {}
        self.searched_s = 0.0  # by a library

    @property
    def spent(self) -> float:
        return time.monotonic() - self.begun

    @property
    def left(self) -> float:
        return self.budget_s + self.searched_s - self.spent

    @contextmanager
    def phase(self, name: str, stock_s: float = math.inf) -> Iterator[None]:
        """`stock_s`: what first calls of stock take there, where no library searches."""
        begun = time.monotonic()
        try:
            yield
        finally:
            taken = time.monotonic() - begun
            self.phases[name] = round(self.phases.get(name, 0.0) + taken, 2)
            self.searched_s += max(0.0, taken - stock_s)


@contextmanager
def timing_plans(
    outlines: Sequence[Outline], device: torch.device, prepare: Prepare, *, graphs: bool
) -> Iterator[Callable[[Callable[[str], object]], dict[str, str]]]:
    """A worker gets ready while others work. What is handed out, called with one who is told what is done, times and
    stores the plans of each, with the ops as they are known by then; by key: why one has none. Raises `NotMeasured`.
    """
    # The worker looks for a database once, and reads what others find: it has to be there by then.
    user_database().why_not_kept()
    clock = Clock(_THOROUGH_S * len(outlines))
    with alone(), PlanTimer(device, prepare, clock, lambda _what: None, graphs).started(outlines) as timer:

        def time_them(say: Callable[[str], object]) -> dict[str, str]:
            left_out = replace(timer, clock=Clock(clock.budget_s), say=say).all(outlines)[1]
            forget_choices()
            return left_out

        yield time_them


@dataclass(frozen=True)
class PlanTimer:
    """Times the plans of calls of models in a worker. `graphs`: whether they are captured where a plan wants it."""

    device: torch.device
    prepare: Prepare
    clock: Clock
    say: Callable[[str], object]
    graphs: bool
    worker: Pool = field(default_factory=lambda: Pool(1))
    _ready: list[Future[None]] = field(default_factory=list)

    @contextmanager
    def started(self, outlines: Sequence[Outline]) -> Iterator[PlanTimer]:
        """Its worker imports, opens the card and rebuilds the first model, which takes seconds, while others work."""
        names = sorted({name for outline in outlines for name in outline.modules})
        skeleton = outlines[0].skeleton if outlines else None
        needed = _ROOM_FOR_TWO + (_ROOM_OF_A_MODEL * skeleton.weights if skeleton else 0)
        on = self.device if (free_memory(self.device) or 0) > needed else None
        with self.worker:
            self._ready.append(self.worker.submit(trials.get_ready, names, on, skeleton, timeout=_IMPORT_S + _STOCK_S))
            yield self

    def all(self, outlines: Sequence[Outline]) -> tuple[dict[tuple[str, bool, str], float], dict[str, str]]:
        """Milliseconds of a call by model, with graphs or not, and plan; and by model, why it has none.

        For the first, which is called now, that is raised.
        """
        if not self._ready[0].done():
            self.say("stock's first calls, for which a library may search")
        with self.clock.phase("start of the worker for plans", 0.0):
            self._wait()
        found = [self._known_wrong(outline) for outline in outlines]
        wanted = _wanted(graphs=self.graphs)
        # What decides most, of each model, comes before all else.
        for several in (wanted[:_DECISIVE], wanted[_DECISIVE:]):
            for outline, answers in zip(outlines, found, strict=True):
                self._add(outline, several, answers)
                with suppress(NotMeasured):  # kept now, since the user may stop it; whether it is enough is asked below
                    _store(outline, self.device, answers, graphs=self.graphs)
        plans: dict[tuple[str, bool, str], float] = {}
        left_out: dict[str, str] = {}
        for number, (outline, answers) in enumerate(zip(outlines, found, strict=True)):
            try:
                _store(outline, self.device, answers, graphs=self.graphs)
            except NotMeasured as reason:
                if not number:
                    raise
                left_out[outline.key] = str(reason)
                continue
            plans |= {(outline.key, self.graphs, name): median(a["ours"]) for name, a in answers.items() if "ours" in a}
        return plans, left_out

    def _wait(self) -> None:
        """It had the time of the ops to start. A host that is slower than that would be no faster the next time: what
        is waited for is not counted.
        """
        try:
            self._ready[0].result()
        except WorkerFailed as error:
            raise NotMeasured(error.message) from error

    def _known_wrong(self, outline: Outline) -> _Answers:
        wrong = known_wrong(outline.key, self.device, graphs=self.graphs, call=outline.call)
        return {name: {"wrong": reason} for name, reason in wrong.items()}

    def _add(self, outline: Outline, plans: Sequence[Plan], found: _Answers) -> None:
        """Milliseconds, or what is wrong, by plan. What was wrong before is not tried again, and what does not fit into
        the time that is left is not begun: a worker that is stopped is lost to all plans after it.
        """
        for plan in plans:
            if plan.name in found:
                continue
            call_s = median(found[STOCK]["ours"]) / 1e3 if "ours" in found.get(STOCK, {}) else 0.0
            left = self.clock.left
            if left <= (0 if plan.name == STOCK else _PLAN_S + _CALLS_OF_A_PLAN * call_s):
                found[plan.name] = {"cut": f"{CUT}: {max(0.0, left):.1f} s were left"}
            else:
                found[plan.name] = self._one(outline, plan, left, call_s)

    def _one(self, outline: Outline, plan: Plan, left: float, call_s: float) -> dict[str, Any]:
        """`call_s`: of a call of stock."""
        is_stock = plan.name == STOCK
        self.say(f"the whole model, {plan.name}")
        given = (outline.skeleton, self.device, plan, self.prepare, self.graphs, left)
        timeout = _STOCK_S if is_stock else max(_TRIAL_S, _CALLS_OF_A_TRIAL * call_s)
        within = math.inf if is_stock else left

        def ask(worker: Worker) -> dict[str, Any]:
            return worker.call(trials.time_plan, *given, timeout=timeout, within=within)

        with self.clock.phase(f"plan {plan.name}", _REBUILT_S if is_stock else math.inf):
            try:
                answer = self.worker.lend(ask).result()
            except OutOfTime:
                return {"cut": f"{CUT}: the time was over after {left:.3g} s"}
            except WorkerFailed as error:
                return {"wrong": str(error)}
        log.info("plan %s of %s: seconds %s", plan.name, outline.key, answer.pop("stages", {}))
        return answer


def _wanted(*, graphs: bool) -> list[Plan]:
    # Without graphs a captured stock model is the model as it came.
    found = [plan for plan in PLANS if graphs or plan.rules or not plan.captured]
    return sorted(found, key=lambda plan: (plan.name != STOCK, not plan.channels_last, not plan.rules))


def _store(outline: Outline, device: torch.device, found: Mapping[str, Mapping[str, Any]], *, graphs: bool) -> None:
    stock = found[STOCK]
    if "wrong" in stock:
        raise CannotBeRebuilt(f"stock could not be timed: {stock['wrong']}")
    timed = [name for name, answer in found.items() if "ours" in answer]
    failed = {name: answer for name, answer in found.items() if "wrong" in answer or "cut" in answer}
    none_is_left = len(found) == len(_wanted(graphs=graphs)) and not any("cut" in answer for answer in found.values())
    compared = STOCK in timed and (none_is_left or len(timed) > 1)
    if not compared:
        # What is wrong need not be found out again; with nothing to compare it decides nothing else.
        found = failed
    here, when, entries = environment.current(device), now(), []
    problem = problem_of(outline.key, outline.call, graphs=graphs)
    for name, answer in found.items():
        if not answer:
            continue
        numerics = answer.get("wrong") or answer.get("cut") or workbench.OK
        figures, of_stock = (math.inf,) * 3, None
        if "ours" in answer:
            beside = answer.get("stock", stock["ours"])
            figures, of_stock = _figures(answer["ours"], beside), 1e3 * median(beside)
        entries.append(Entry(OP, problem, here, kernels_hash(), name, {}, *figures, of_stock, numerics, when))
    user_database().put(entries)
    if not compared:
        raise NotMeasured("its time was over before a plan could be compared with stock")


def _figures(ours: list[float], stock: list[float]) -> tuple[float, float, float]:
    least, most = interval(ours, stock)
    middle = 1e3 * median(stock)
    return 1e3 * median(ours), middle / most, middle / least


@contextmanager
def alone(wait_s: float = 0.0, waiting: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Two processes that measure one card at once would measure one another: the second waits, but no longer."""
    path = default_path().with_name("calibrating.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("a")
    except OSError:
        # What is measured is not kept either, and somebody has said so.
        yield
        return
    with lock:
        until = time.monotonic() + wait_s
        while not _taken(lock):
            if time.monotonic() >= until:
                raise NotMeasured("another process measures its card now")
            waiting()
            time.sleep(_ASKS_AGAIN_S)
        yield


def _taken(lock: IO[str]) -> bool:
    if fcntl is not None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True
