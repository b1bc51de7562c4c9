"""Measure once which plan and which ops are the fastest for a model on this card, in worker processes.

The user's process only traces: which problems of which ops the model's call makes. A worker that has the card times
the ops: each problem by its share of the time, with what the libraries offer and with the configs that were compiled in
time. Meanwhile another imports the model's classes; it then rebuilds the model from its shapes, with random weights,
and times whole plans with the ops as they were found. So nothing that was never tried runs in the user's process, and a
candidate that crashes or hangs costs itself. All is stored as it is measured, so Ctrl-C loses nothing.
"""

from __future__ import annotations

import logging
import math
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from rocm_sd.engine.calibration import trials
from rocm_sd.engine.calibration.first_calls import searches_ops
from rocm_sd.engine.calibration.plans import OP, PLANS, kernels_hash, known_wrong, problem_of
from rocm_sd.engine.calibration.skeleton import Skeleton, described_call, model_key
from rocm_sd.engine.calibration.tracing import trace_call
from rocm_sd.engine.memory import free_memory, is_out_of_memory
from rocm_sd.measuring import interval
from rocm_sd.ops.registry import forget_choices
from rocm_sd.tuning import environment
from rocm_sd.tuning.choice import STOCK
from rocm_sd.tuning.entries import Entry, now
from rocm_sd.tuning.location import default_path
from rocm_sd.tuning.resolve import user_database
from rocm_sd.tuning.search import workbench
from rocm_sd.tuning.search.halving import Halving
from rocm_sd.tuning.search.tuner import Tuner, TunerOptions
from rocm_sd.tuning.search.watching import Watched
from rocm_sd.tuning.search.workbench import OK
from rocm_sd.workers import OutOfTime, Pool, Worker, WorkerFailed

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    import torch
    from torch import nn

    from rocm_sd.engine.calibration.plans import Plan
    from rocm_sd.engine.calibration.trials import Prepare
    from rocm_sd.tuning.search.calls import Traced
    from rocm_sd.tuning.search.problems import TuningResult

    Progress = Callable[[str, float, float], object]

__all__ = ["BUDGET_S", "Calibration", "CannotBeRebuilt", "NotMeasured", "Subject", "calibrate"]

log = logging.getLogger("rocm_sd")

BUDGET_S = 30.0
# Of it; ops are searched in the rest. A model whose calls are slow needs more, for so many calls of it.
_FOR_PLANS_S, _CALLS_OF_PLANS, _MOST_FOR_PLANS = 10.0, 30, 2 / 3
# Of what is left: of the first model where another comes along, and of each plan where others follow.
_OF_THE_FIRST, _OF_A_PLAN = 2 / 3, 0.6
_THOROUGH_S = 60.0  # for the plans of each model, where the ops have a budget of their own
# For one plan: it is captured, and what was not compiled before is; and not less than for so many calls of the model.
_TRIAL_S, _CALLS_OF_A_TRIAL = 10.0, 60
# One that was not done in these seconds, and in so many calls, hangs. With less it may have been slow.
_HANGS_S, _CALLS_OF_A_HANG = 3.0, 30
_STOCK_S = 600.0  # for stock, which comes first: a library may search at the first calls of each size
# First calls of stock that take longer have a library at its search. The first picture would wait for it in any case,
# and no budget of ours ends it.
_TRACED_S, _REBUILT_S = 3.0, 6.0
_IMPORT_S = 300.0
_ROOM_FOR_TWO = 4 * 2**30  # bytes that are free: then both workers may have the card open


class NotMeasured(Exception):
    """No plan could be measured; its text is the reason. It holds for all models that were to be measured."""


class CannotBeRebuilt(NotMeasured):
    """A reason that lies in the first of them."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A model and a call of it."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def key(self) -> str:
        return model_key(self.model)

    @property
    def call(self) -> str:
        return described_call(self.args, self.kwargs)


@dataclass(frozen=True)
class Calibration:
    """`ops`: an outcome for each problem. `plans`: milliseconds of a call by model, with graphs or not, and plan.

    `phases`: seconds by what they were spent on. `left_out`: by the key of a model that came along, why it has no plan.
    """

    ops: Sequence[TuningResult]
    plans: Mapping[tuple[str, bool, str], float]
    seconds: float
    interrupted: bool
    phases: Mapping[str, float] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)


class _Clock:
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


def _quick(budget_s: float) -> TunerOptions:
    """For a search that a user waits for at a first picture."""
    strategy = Halving(first=4, growth=3, last=8, share=0.8)
    return TunerOptions(budget_s, timeout_s=10.0, strategy=strategy, confirmed=8, shortlist=4)


def calibrate(
    subjects: Sequence[Subject],
    device: torch.device,
    prepare: Prepare,
    *,
    graphs: bool,
    options: TunerOptions | None = None,
    progress: Progress = lambda _what, _spent, _of: None,
) -> Calibration:
    """The first subject is the one that is called now. `graphs`: whether plans are timed as graphs, or launched.

    It ends with its budget, which is BUDGET_S unless `options` have another for the ops: what was not timed by then is
    not there. `progress` hears what is done, how many seconds were spent, and of how many. Raises `NotMeasured`.
    """
    clock = _Clock(BUDGET_S if options is None else options.budget_s + _THOROUGH_S * len(subjects))

    def say(what: str) -> None:
        progress(what, clock.spent, clock.budget_s)

    why_not_kept = user_database().why_not_kept()
    if why_not_kept is not None:
        # Each process would measure anew; and the workers, which read what was found so far, would not see it.
        raise NotMeasured(f"it cannot be kept ({why_not_kept}); ROCM_SD_CACHE names another folder")
    skeletons = _skeletons(subjects)
    names = sorted({type(module).__module__ for subject in skeletons for module in subject.model.modules()})
    roomy = (free_memory(device) or 0) > _ROOM_FOR_TWO
    with _alone(), Pool(1) as planning:
        ready = planning.submit(trials.get_ready, names, device if roomy else None, timeout=_IMPORT_S)
        with Worker(imports=(workbench.__name__,)) as measuring:
            measuring.start()
            say("tracing")
            with clock.phase("tracing", _TRACED_S):
                traced, call_s = _traced(skeletons)
            if options is None and not searches_ops(device):
                traced = []
            if options is None:
                options = _quick(
                    BUDGET_S - min(max(_FOR_PLANS_S, _CALLS_OF_PLANS * call_s), _MOST_FOR_PLANS * BUDGET_S)
                )
            tuner = Tuner(device, user_database(), options, lambda step: say(step.what))
            with clock.phase("ops"):
                outcomes = tuner.run(traced, clock.begun + clock.searched_s, measuring)
        forget_choices()
        plans: dict[tuple[str, bool, str], float] = {}
        left_out: dict[str, str] = {}
        if not tuner.interrupted:
            with clock.phase("start of the worker for plans", 0.0):
                _wait_for(ready)
            for number, (subject, skeleton) in enumerate(skeletons.items()):
                share = clock.left * (1.0 if number == len(skeletons) - 1 else _OF_THE_FIRST)
                try:
                    wrong = known_wrong(subject.key, device, graphs=graphs, call=subject.call)
                    timed = _Trials(planning, skeleton, device, prepare, clock, share, call_s, say)
                    found = timed.all(wrong, graphs=graphs)
                    _store(subject, device, found, graphs=graphs)
                except NotMeasured as reason:
                    if not number:
                        raise
                    left_out[subject.key] = str(reason)
                    continue
                plans |= {(subject.key, graphs, plan): median(a["ours"]) for plan, a in found.items() if "ours" in a}
    log.info("calibration: %d problems, plans %s, seconds by phase: %s", len(outcomes), plans, clock.phases)
    return Calibration(outcomes, plans, clock.spent, tuner.interrupted, clock.phases, left_out)


def _wait_for(ready: Future[None]) -> None:
    """It had the time of the ops to start. A host that is slower than that would be no faster the next time: what is
    waited for is not counted.
    """
    try:
        ready.result()
    except WorkerFailed as error:
        raise NotMeasured(error.message) from error


@contextmanager
def _alone() -> Iterator[None]:
    """Two processes that measure one card at once would measure one another."""
    path = default_path().with_name("calibrating.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("a")
    except OSError:
        # What is measured is not kept either, and somebody has said so.
        yield
        return
    with lock:
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise NotMeasured("another process measures its card now") from error
        yield


def _skeletons(subjects: Sequence[Subject]) -> dict[Subject, Skeleton]:
    """Of the first, and of those others that can be rebuilt."""
    found = {subject: _skeleton(subject, needed=subject is subjects[0]) for subject in subjects}
    return {subject: skeleton for subject, skeleton in found.items() if skeleton is not None}


def _skeleton(subject: Subject, *, needed: bool) -> Skeleton | None:
    try:
        return Skeleton.of(subject.model, subject.args, subject.kwargs)
    except Exception as error:  # what a pickle cannot take along is said in as many ways as there are classes
        if needed:
            raise CannotBeRebuilt(f"it cannot be rebuilt: {type(error).__name__}: {error}") from error
        return None


def _traced(subjects: Iterable[Subject]) -> tuple[list[Traced], float]:
    """And the seconds of a call of each of them together."""
    seen = Watched()
    seconds = [_trace(subject, seen, needed=not number) for number, subject in enumerate(subjects)]
    return seen.traced(), sum(seconds)


def _trace(subject: Subject, seen: Watched, *, needed: bool) -> float:
    try:
        return trace_call(subject.model, subject.args, subject.kwargs, seen)
    except Exception as error:
        if needed and not is_out_of_memory(error):
            raise CannotBeRebuilt(f"it cannot be traced: {type(error).__name__}: {error}") from error
        log.info("%s is not traced: %s", type(subject.model).__name__, error)
        return 0.0


def _wanted(*, graphs: bool) -> list[Plan]:
    # Without graphs a captured stock model is the model as it came.
    found = [plan for plan in PLANS if graphs or plan.rules or not plan.captured]
    return sorted(found, key=lambda plan: (plan.name != STOCK, not plan.channels_last, not plan.rules))


@dataclass(frozen=True)
class _Trials:
    """The plans of one call of a model, each timed by the worker, in so many `seconds` together."""

    worker: Pool
    skeleton: Skeleton
    device: torch.device
    prepare: Prepare
    clock: _Clock
    seconds: float
    call_s: float
    say: Callable[[str], None]

    def all(self, wrong: Mapping[str, str], *, graphs: bool) -> dict[str, dict[str, Any]]:
        """Milliseconds, or what is wrong, by plan. Stock comes first, and then those that change most: where the time
        ends, the rest is not there. What was `wrong` before is not tried again.
        """
        found: dict[str, dict[str, Any]] = {name: {"wrong": reason} for name, reason in wrong.items()}
        wanted = [plan for plan in _wanted(graphs=graphs) if plan.name not in found]
        before, end = self.clock.searched_s, time.monotonic() + self.seconds
        for plan in wanted:
            left = end - time.monotonic() + self.clock.searched_s - before
            share = 1.0 if plan is wanted[-1] else _OF_A_PLAN
            answer = self._one(plan, share * left, graphs=graphs) if left > 0 else None
            if answer is not None:
                found[plan.name] = answer
        return found

    def _one(self, plan: Plan, left: float, *, graphs: bool) -> dict[str, Any] | None:
        """None where its time ended."""
        is_stock = not plan.rules and not plan.captured
        self.say(f"the whole model, {plan.name}")
        given = (self.skeleton, self.device, plan, self.prepare, graphs, left)
        timeout = _STOCK_S if is_stock else max(_TRIAL_S, _CALLS_OF_A_TRIAL * self.call_s)
        within = math.inf if is_stock else left

        def ask(worker: Worker) -> dict[str, Any]:
            return worker.call(trials.time_plan, *given, timeout=timeout, within=within)

        with self.clock.phase(f"plan {plan.name}", _REBUILT_S if is_stock else math.inf):
            try:
                return self.worker.lend(ask).result()
            except OutOfTime:
                hangs = left >= _HANGS_S + _CALLS_OF_A_HANG * self.call_s
                return {"wrong": f"{workbench.HUNG}: stopped after {left:.3g} s without an answer"} if hangs else None
            except WorkerFailed as error:
                return {"wrong": str(error)}


def _store(subject: Subject, device: torch.device, found: Mapping[str, Mapping[str, Any]], *, graphs: bool) -> None:
    stock = found.get(STOCK, {})
    if "wrong" in stock:
        raise CannotBeRebuilt(f"stock could not be timed: {stock['wrong']}")
    wrong = {name: answer for name, answer in found.items() if "wrong" in answer}
    compared = bool(stock) and (len(found) == len(_wanted(graphs=graphs)) or len(found) > len(wrong) + 1)
    if not compared:
        # What is wrong need not be found out again; with nothing to compare it decides nothing else.
        found = wrong
    here, when, entries = environment.current(device), now(), []
    problem = problem_of(subject.key, subject.call, graphs=graphs)
    for name, answer in found.items():
        if not answer:
            continue
        numerics, figures, of_stock = answer.get("wrong", OK), (math.inf,) * 3, None
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
