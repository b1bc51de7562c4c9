"""Measure once which plan and which ops are the fastest for a model on this card, in worker processes.

The user's process only traces: which problems of which ops the model's call makes. A worker that has the card times
the ops: each problem by its share of the time, with what the libraries offer and with the configs that were compiled in
time. Meanwhile another imports the model's classes; it then rebuilds the model from its shapes, with random weights,
and times whole plans with the ops as they were found. So nothing that was never tried runs in the user's process, and a
candidate that crashes or hangs costs itself. All is stored as it is measured, so Ctrl-C loses nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rocm_sd.engine.calibration.first_calls import searches_ops
from rocm_sd.engine.calibration.plan_times import Clock, PlanTimer, alone
from rocm_sd.engine.calibration.plans import measured, was_cut
from rocm_sd.engine.calibration.subjects import CannotBeRebuilt, NotMeasured, Outline
from rocm_sd.engine.calibration.tracing import trace_call
from rocm_sd.engine.memory import is_out_of_memory
from rocm_sd.ops.registry import forget_choices
from rocm_sd.tuning.resolve import user_database
from rocm_sd.tuning.search import workbench
from rocm_sd.tuning.search.tuner import Tuner, TunerOptions
from rocm_sd.tuning.search.watching import Watched
from rocm_sd.workers import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

    from rocm_sd.engine.calibration.subjects import Subject
    from rocm_sd.engine.calibration.trials import Prepare
    from rocm_sd.tuning.search.calls import Traced
    from rocm_sd.tuning.search.problems import TuningResult

    Progress = Callable[[str, float, float], object]

__all__ = ["BUDGET_S", "Calibration", "calibrate"]

log = logging.getLogger("rocm_sd")

BUDGET_S = 30.0
_WAITS_S = 2 * BUDGET_S  # for another process, which may measure two models one after the other
# Of it; ops are searched in the rest. A model whose calls are slow needs more, for so many calls of it.
_FOR_PLANS_S, _CALLS_OF_PLANS, _MOST_FOR_PLANS = 10.0, 30, 2 / 3
_CANDIDATE_S = 8.0  # for one that is compiled, and takes milliseconds: a hang is over within ten
# First calls of stock that take longer have a library at its search. The first picture would wait for it in any case,
# and no budget of ours ends it.
_TRACED_S = 8.0


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


def calibrate(
    subjects: Sequence[Subject],
    device: torch.device,
    prepare: Prepare,
    *,
    graphs: bool,
    progress: Progress = lambda _what, _spent, _of: None,
) -> Calibration:
    """The first subject is the one that is called now. `graphs`: whether plans are timed as graphs, or launched.

    It ends with its budget: what was not timed by then is not there. `progress` hears what is done, how many seconds
    were spent, and of how many. Where another process measures the same, it is waited for, and nothing is done twice:
    ranks that begin together have one plan, and draw the same bits. Raises `NotMeasured`.
    """
    why_not_kept = user_database().why_not_kept()
    if why_not_kept is not None:
        # Each process would measure anew; and the workers, which read what was found so far, would not see it.
        raise NotMeasured(f"it cannot be kept ({why_not_kept}); ROCM_SD_CACHE names another folder")
    outlines = _outlines(subjects)
    with alone(_WAITS_S, lambda: progress("another process measures", 0.0, BUDGET_S)):
        first = subjects[0]
        if measured(first.key, device, graphs=graphs, call=first.call) is not None:
            forget_choices()
            return Calibration((), {}, 0.0, interrupted=False)
        return _calibrated(outlines, device, prepare, progress, graphs=graphs)


def _calibrated(
    outlines: Mapping[Subject, Outline], device: torch.device, prepare: Prepare, progress: Progress, *, graphs: bool
) -> Calibration:
    clock = Clock(BUDGET_S)

    def say(what: str) -> None:
        progress(what, clock.spent, clock.budget_s)

    try:
        with PlanTimer(device, prepare, clock, say, graphs).started(list(outlines.values())) as timer:
            outcomes, interrupted = _ops(outlines, device, clock, say, graphs=graphs)
            forget_choices()
            plans, left_out = ({}, {}) if interrupted else timer.all(list(outlines.values()))
    finally:
        log.info("calibration: seconds by phase: %s", clock.phases)
    return Calibration(outcomes, plans, clock.spent, interrupted, clock.phases, left_out)


def _ops(
    outlines: Mapping[Subject, Outline],
    device: torch.device,
    clock: Clock,
    say: Callable[[str], object],
    *,
    graphs: bool,
) -> tuple[list[TuningResult], bool]:
    """What was found for each problem, and whether the user has interrupted it."""
    # Where an earlier calibration had no time left for the plans, they come first.
    cut = any(was_cut(each.key, device, graphs=graphs, call=each.call) for each in outlines.values())
    if cut or not searches_ops(device):
        return [], False
    with Worker(imports=(workbench.__name__,)) as measuring:
        measuring.start()
        say("tracing")
        with clock.phase("tracing", _TRACED_S):
            traced, call_s = _traced(outlines)
        for_plans = min(max(_FOR_PLANS_S, _CALLS_OF_PLANS * call_s), _MOST_FOR_PLANS * BUDGET_S)
        options = TunerOptions(BUDGET_S - for_plans, timeout_s=_CANDIDATE_S).quick()
        tuner = Tuner(device, user_database(), options, lambda step: say(step.what))
        with clock.phase("ops"):
            return tuner.run(traced, clock.begun + clock.searched_s, measuring), tuner.interrupted


def _outlines(subjects: Sequence[Subject]) -> dict[Subject, Outline]:
    """Of the first, and of those others that can be rebuilt."""
    found = {subject: _outline(subject, needed=subject is subjects[0]) for subject in subjects}
    return {subject: outline for subject, outline in found.items() if outline is not None}


def _outline(subject: Subject, *, needed: bool) -> Outline | None:
    try:
        return Outline.of(subject)
    except CannotBeRebuilt:
        if needed:
            raise
        return None


def _traced(subjects: Iterable[Subject]) -> tuple[list[Traced], float]:
    """And the seconds of a call of each of them together."""
    seen = Watched()
    seconds = [_trace(subject, seen, needed=not number) for number, subject in enumerate(subjects)]
    return seen.traced(), sum(seconds)


def _trace(subject: Subject, seen: Watched, *, needed: bool) -> float:
    # What a picture makes at each step is searched before what it makes once.
    seen.each = subject.times
    try:
        return trace_call(subject.model, subject.args, subject.kwargs, seen)
    except Exception as error:
        if needed and not is_out_of_memory(error):
            raise CannotBeRebuilt(f"it cannot be traced: {type(error).__name__}: {error}") from error
        log.info("%s is not traced: %s", type(subject.model).__name__, error)
        return 0.0
