"""Measure once which plan and which ops are the fastest for a model on this card, in a worker process.

The worker rebuilds the model from its shapes, with random weights: the user's process runs nothing that was never
tried, and a candidate that crashes or hangs costs itself. Ops come first: each problem of the model, by its share of
the time, with what a library offers and with the configs that were compiled in time. Then whole plans are timed with
what was found. Everything is stored as it is measured, so Ctrl-C loses nothing.
"""

from __future__ import annotations

import logging
import math
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Any

from rocm_sd.engine.calibration import trials
from rocm_sd.engine.calibration.plans import OP, PLANS, kernels_hash, problem_of
from rocm_sd.engine.calibration.skeleton import Skeleton
from rocm_sd.measuring import interval
from rocm_sd.ops.registry import forget_choices
from rocm_sd.tuning import environment
from rocm_sd.tuning.choice import STOCK
from rocm_sd.tuning.entries import Entry, now
from rocm_sd.tuning.resolve import user_database
from rocm_sd.tuning.search.halving import Halving
from rocm_sd.tuning.search.tuner import Tuner, TunerOptions
from rocm_sd.tuning.search.workbench import OK
from rocm_sd.workers import OutOfTime, WorkerFailed, shared

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import nn

    from rocm_sd.engine.calibration.plans import Plan
    from rocm_sd.engine.calibration.trials import Prepare
    from rocm_sd.tuning.search.problems import TuningResult
    from rocm_sd.workers import Worker

__all__ = ["BUDGET_S", "Calibration", "NotMeasured", "calibrate", "quick_options"]

log = logging.getLogger("rocm_sd")

BUDGET_S = 24.0
_PLANS_S = 6.0  # of the budget, kept for timing plans
_TRIAL_S = 30.0  # for a plan: its kernels are compiled, and captured
_START_S = 60.0  # to rebuild and trace a model, the libraries' first calls included


class NotMeasured(Exception):
    """No plan could be measured; its text is the reason."""


@dataclass(frozen=True)
class Calibration:
    """`ops`: an outcome for each problem. `plans`: milliseconds of a call by mode and plan."""

    ops: list[TuningResult]
    plans: Mapping[tuple[bool, str], float]
    seconds: float
    interrupted: bool


def quick_options(budget_s: float) -> TunerOptions:
    """For a search that a user waits for at a first picture."""
    strategy = Halving(first=4, growth=3, last=8, share=0.8)
    return TunerOptions(budget_s, timeout_s=10.0, strategy=strategy, confirmed=8, shortlist=4, compiled_alone=True)


def calibrate(
    model: nn.Module,
    key: str,
    call: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device: torch.device,
    prepare: Prepare,
    *,
    options: TunerOptions | None = None,
    progress: Callable[[str, float, float], object] = lambda _what, _spent, _of: None,
) -> Calibration:
    """`key` and `call` name the model and the shapes of its call; `progress` hears what, of how many seconds how many."""
    options = options or quick_options(BUDGET_S)
    begun = time.monotonic()
    budget = options.budget_s

    def say(what: str) -> None:
        progress(what, time.monotonic() - begun, budget)

    try:
        skeleton = Skeleton.of(model, args, kwargs)
    except Exception as error:
        raise NotMeasured(f"it cannot be rebuilt: {type(error).__name__}: {error}") from error
    with shared() as worker:
        say("starting")
        try:
            traced = worker.call(trials.trace, skeleton, device, prepare, timeout=_START_S)
        except (WorkerFailed, OutOfTime) as error:
            raise NotMeasured(str(error)) from error
        log.info("calibration: traced %d problems after %.1f s", len(traced), time.monotonic() - begun)
        tuner = Tuner(device, user_database(), options, lambda step: say(step.what))
        outcomes = tuner.run(traced, begun, worker)
        log.info("calibration: ops after %.1f s", time.monotonic() - begun)
        forget_choices()
        found = {} if tuner.interrupted else _Trials(worker, skeleton, device, prepare, say).timed()
        if found:
            _store(key, call, device, found)
        with suppress(WorkerFailed, OutOfTime):
            worker.call(trials.close, timeout=_TRIAL_S)
    plans = {each: median(answer["ms"]) for each, answer in found.items() if "ms" in answer}
    log.info("calibration: plans after %.1f s: %s", time.monotonic() - begun, plans)
    return Calibration(outcomes, plans, time.monotonic() - begun, tuner.interrupted)


@dataclass(frozen=True)
class _Trials:
    """The plans of one call of a model, each timed by the worker with graphs and without."""

    worker: Worker
    skeleton: Skeleton
    device: torch.device
    prepare: Prepare
    say: Callable[[str], None]

    def timed(self) -> dict[tuple[bool, str], dict[str, Any]]:
        """Milliseconds, or what is wrong, by (with graphs, plan)."""
        found: dict[tuple[bool, str], dict[str, Any]] = {}
        for graphs, plan in product((True, False), PLANS):
            # Without graphs both of these are the model as it came.
            if graphs or plan.rules:
                found[graphs, plan.name] = self._one(plan, graphs=graphs)
        return found

    def _one(self, plan: Plan, *, graphs: bool) -> dict[str, Any]:
        self.say(f"the whole model, {plan.name}")
        given = (self.skeleton, self.device, plan, self.prepare, graphs)
        try:
            return self.worker.call(trials.time_plan, *given, timeout=_TRIAL_S)
        except (WorkerFailed, OutOfTime) as error:
            return {"wrong": str(error)}


def _store(key: str, call: str, device: torch.device, found: Mapping[tuple[bool, str], Mapping[str, Any]]) -> None:
    stock = found[True, STOCK]
    if "ms" not in stock:
        raise NotMeasured(f"stock could not be timed: {stock['wrong']}")
    here, when, entries = environment.current(device), now(), []
    for graphs, plan in product((True, False), PLANS):
        answer = stock if plan.name == STOCK else found.get((graphs, plan.name))
        if answer is None:
            continue
        problem = problem_of(key, call, graphs=graphs)
        numerics, figures, of_stock = answer.get("wrong", OK), (math.inf,) * 3, None
        if "ms" in answer:
            figures, of_stock = _figures(answer["ms"], stock["ms"]), 1e3 * median(stock["ms"])
        entries.append(Entry(OP, problem, here, kernels_hash(), plan.name, {}, *figures, of_stock, numerics, when))
    user_database().put(entries)
    forget_choices()


def _figures(ours: list[float], stock: list[float]) -> tuple[float, float, float]:
    least, most = interval(ours, stock)
    middle = 1e3 * median(stock)
    return 1e3 * median(ours), middle / most, middle / least
