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
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from rocm_sd.engine.calibration import trials
from rocm_sd.engine.calibration.plans import OP, PLANS, kernels_hash, problem_of
from rocm_sd.engine.calibration.skeleton import Skeleton, described_call, model_key
from rocm_sd.engine.calibration.tracing import trace_call
from rocm_sd.engine.memory import is_out_of_memory
from rocm_sd.measuring import interval
from rocm_sd.ops.registry import forget_choices
from rocm_sd.tuning import environment
from rocm_sd.tuning.choice import STOCK
from rocm_sd.tuning.entries import Entry, now
from rocm_sd.tuning.location import default_path
from rocm_sd.tuning.resolve import user_database
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
    Plans = dict[tuple[str, bool, str], float]

__all__ = ["BUDGET_S", "Calibration", "NotMeasured", "Outline", "Subject", "calibrate", "time_plans"]

log = logging.getLogger("rocm_sd")

BUDGET_S = 30.0
_FOR_PLANS_S = 7.0  # of it; ops are searched in the rest
_TRIAL_S = 30.0  # for one plan: it is captured, and what was not compiled before is
_STOCK_S = 600.0  # for stock, which comes first: a library may search at the first calls of each size
_IMPORT_S = 300.0


class NotMeasured(Exception):
    """No plan could be measured; its text is the reason."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A model and a call of it, which a picture makes so many times."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    times: int = 1

    @property
    def key(self) -> str:
        return model_key(self.model)

    @property
    def call(self) -> str:
        return described_call(self.args, self.kwargs)


@dataclass(frozen=True)
class Outline:
    """A subject without its tensors, as a worker rebuilds it, and the names that its plans are stored under."""

    key: str
    call: str
    skeleton: Skeleton
    modules: frozenset[str]  # that its classes come from

    @classmethod
    def of(cls, subject: Subject) -> Outline:
        """Raises `NotMeasured`."""
        try:
            skeleton = Skeleton.of(subject.model, subject.args, subject.kwargs)
        except Exception as error:  # what a pickle cannot take along is said in as many ways as there are classes
            raise NotMeasured(f"it cannot be rebuilt: {type(error).__name__}: {error}") from error
        modules = frozenset(type(module).__module__ for module in subject.model.modules())
        return cls(subject.key, subject.call, skeleton, modules)


@dataclass(frozen=True)
class Calibration:
    """`ops`: an outcome for each problem. `plans`: milliseconds of a call by model, with graphs or not, and plan."""

    ops: Sequence[TuningResult]
    plans: Mapping[tuple[str, bool, str], float]
    seconds: float
    interrupted: bool


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

    `progress` hears what is done, how many seconds were spent, and of how many. Raises `NotMeasured`.
    """
    begun = time.monotonic()
    budget = BUDGET_S if options is None else options.budget_s + _FOR_PLANS_S

    def say(what: str) -> None:
        progress(what, time.monotonic() - begun, budget)

    outlines = _outlines(subjects)
    with _alone(), _planning(outlines.values()) as (planning, imported):
        with Worker() as measuring:
            measuring.start()
            say("tracing")
            traced = _traced(outlines)
            tuner = Tuner(
                device, user_database(), options or _quick(BUDGET_S - _FOR_PLANS_S), lambda step: say(step.what)
            )
            outcomes = tuner.run(traced, begun, measuring)
        forget_choices()
        log.info("calibration: %d problems searched after %.1f s", len(outcomes), time.monotonic() - begun)
        plans: Plans = {}
        if not tuner.interrupted:
            plans = _timed(outlines.values(), imported, _Trials(planning, device, prepare, say, graphs))
    log.info("calibration: %s after %.1f s", plans, time.monotonic() - begun)
    return Calibration(outcomes, plans, time.monotonic() - begun, tuner.interrupted)


def time_plans(
    outlines: Sequence[Outline],
    device: torch.device,
    prepare: Prepare,
    *,
    graphs: bool,
    say: Callable[[str], object] = lambda _what: None,
) -> Plans:
    """Time whole plans with the ops as they are known by now, and store them. Raises `NotMeasured`."""
    with _alone(), _planning(outlines) as (planning, imported):
        return _timed(outlines, imported, _Trials(planning, device, prepare, say, graphs))


def _traced(subjects: Iterable[Subject]) -> list[Traced]:
    """The problems of all. Only the first, which is called now, has to be traced."""
    seen = Watched()
    for number, subject in enumerate(subjects):
        seen.each = subject.times
        _trace(subject, seen, needed=not number)
    return seen.traced()


@contextmanager
def _planning(outlines: Iterable[Outline]) -> Iterator[tuple[Pool, Future[None]]]:
    """The worker that will time plans, and its imports, which take seconds."""
    with Pool(1) as planning:
        names = sorted({name for outline in outlines for name in outline.modules})
        yield planning, planning.submit(trials.import_all, names, timeout=_IMPORT_S)


def _timed(outlines: Iterable[Outline], imported: Future[None], timing: _Trials) -> Plans:
    plans: Plans = {}
    try:
        imported.result()
        for outline in outlines:
            found = timing.of(outline.skeleton)
            _store(outline, timing.device, found, graphs=timing.graphs)
            plans |= {(outline.key, timing.graphs, plan): median(a["ours"]) for plan, a in found.items() if "ours" in a}
    except WorkerFailed as error:
        raise NotMeasured(error.message) from error
    return plans


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


def _outlines(subjects: Sequence[Subject]) -> dict[Subject, Outline]:
    """Of the first, and of those others that can be rebuilt."""
    found = {subject: _outline(subject, needed=subject is subjects[0]) for subject in subjects}
    return {subject: outline for subject, outline in found.items() if outline is not None}


def _outline(subject: Subject, *, needed: bool) -> Outline | None:
    try:
        return Outline.of(subject)
    except NotMeasured:
        if needed:
            raise
        return None


def _trace(subject: Subject, seen: Watched, *, needed: bool) -> None:
    try:
        trace_call(subject.model, subject.args, subject.kwargs, seen)
    except Exception as error:
        if needed and not is_out_of_memory(error):
            raise NotMeasured(f"it cannot be traced: {type(error).__name__}: {error}") from error
        log.info("%s is not traced: %s", type(subject.model).__name__, error)


@dataclass(frozen=True)
class _Trials:
    """The plans of calls of models, each timed by the worker."""

    worker: Pool
    device: torch.device
    prepare: Prepare
    say: Callable[[str], object]
    graphs: bool

    def of(self, skeleton: Skeleton) -> dict[str, dict[str, Any]]:
        """Milliseconds, or what is wrong, by plan."""
        # Without graphs a captured stock model is the model as it came.
        return {
            plan.name: self._one(skeleton, plan) for plan in PLANS if self.graphs or plan.rules or not plan.captured
        }

    def _one(self, skeleton: Skeleton, plan: Plan) -> dict[str, Any]:
        self.say(f"the whole model, {plan.name}")
        given = (skeleton, self.device, plan, self.prepare, self.graphs)
        timeout = _TRIAL_S if plan.rules or plan.captured else _STOCK_S
        try:
            return self.worker.submit(trials.time_plan, *given, timeout=timeout).result()
        except (WorkerFailed, OutOfTime) as error:
            return {"wrong": str(error)}


def _store(outline: Outline, device: torch.device, found: Mapping[str, Mapping[str, Any]], *, graphs: bool) -> None:
    stock = found[STOCK]
    if "ours" not in stock:
        raise NotMeasured(f"stock could not be timed: {stock['wrong']}")
    here, when, entries = environment.current(device), now(), []
    problem = problem_of(outline.key, outline.call, graphs=graphs)
    for name, answer in found.items():
        if not answer:
            continue
        numerics, figures, of_stock = answer.get("wrong", OK), (math.inf,) * 3, None
        if "ours" in answer:
            beside = answer.get("stock", stock["ours"])
            figures, of_stock = _figures(answer["ours"], beside), 1e3 * median(beside)
        entries.append(Entry(OP, problem, here, kernels_hash(), name, {}, *figures, of_stock, numerics, when))
    user_database().put(entries)


def _figures(ours: list[float], stock: list[float]) -> tuple[float, float, float]:
    least, most = interval(ours, stock)
    middle = 1e3 * median(stock)
    return 1e3 * median(ours), middle / most, middle / least
