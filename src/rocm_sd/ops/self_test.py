"""At first use on a card and its versions: is what a candidate computes there right? One that fails is set aside.

It is tried once in each dtype, and then in each variant of its code that a call is to run (a tail, a mask, a split, a
config); `trials` says on what. The verdict is remembered in the performance database. What is tried runs in a worker
process and never in the user's: a crash is a verdict, a hang is ended, and the picture goes on with stock torch.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from rocm_sd import workers
from rocm_sd.kernels import triton as triton_kernels
from rocm_sd.kernels.config import NO_CONFIG
from rocm_sd.ops import trials
from rocm_sd.ops.trials import Answer, Trial
from rocm_sd.tuning.environment import current
from rocm_sd.tuning.resolve import has_database, user_database

if TYPE_CHECKING:
    from rocm_sd.kernels.config import Config
    from rocm_sd.ops.candidates import OpCandidates
    from rocm_sd.tuning import Problem
    from rocm_sd.tuning.environment import Environment

    _Key = tuple[str, str, Environment, str]

__all__ = ["SelfTestVerdict", "catch_up", "forget", "note", "passed", "set_aside", "start", "verdict"]

log = logging.getLogger("rocm_sd")

# To compile, and to let stock's libraries search: MIOpen alone may take minutes for a convolution that it never met.
_PREPARE_S = 600.0
# For the candidate's own run of milliseconds, compiled before; a hang ends within this.
_JUDGE_S = 8.0
# A library may search at its first call, too: that it takes so long twice, in two processes, is no chance.
_HANGS = 2
# Where no worker has room beside the model, each attempt would take seconds, for every kernel of the model.
_UNUSABLE_S = 60.0


@dataclass(frozen=True)
class SelfTestVerdict:
    """`later`: it cannot be tested now, since a graph is captured or a call is traced, and must not be used yet.

    `unseen`: what is launched now is only compiled, and nobody looks at the result: it is to be used, and tested later.
    """

    state: Literal["passed", "failed", "later", "unseen"]
    reason: str = ""


_PASSED = SelfTestVerdict("passed")
_known: dict[tuple[Any, ...], SelfTestVerdict] = {}
_noted: set[tuple[str, Trial]] = set()
# What a model has used without a test, since its launches were only noted.
_unseen: dict[tuple[str, Trial], OpCandidates] = {}
# Until when no worker is asked for a device, and why.
_unusable: dict[torch.device, tuple[float, str]] = {}


def forget() -> None:
    """What this process knows; the database keeps its own."""
    _known.clear()
    _noted.clear()
    _unseen.clear()
    _unusable.clear()


def start(device: torch.device) -> None:
    """Start the worker while other things are prepared, where nothing was measured or tested before."""
    if not workers.inside() and not has_database():
        workers.start_shared(trials.get_ready, device)


def catch_up() -> None:
    """Test now what was used while launches were only noted.

    Inside the model's real call each test would need its memory beside the model's: in a VAE at the peak of a picture.
    """
    for key in list(_unseen):
        # Another thread may have been here first.
        op = _unseen.pop(key, None)
        if op is not None:
            _verdict(op, key[1])


def verdict(
    op: OpCandidates, candidate: str, problem: Problem, device: torch.device, config: Config = NO_CONFIG
) -> SelfTestVerdict:
    """From memory, else from the database, else by a test now: of the candidate, and of the variant that is to run."""
    dtype = str(problem.get("dtype", ""))
    found = _verdict(op, Trial(candidate, dtype, device))
    variant = trials.variant_of(op, candidate, problem, config, device)
    if not variant or found.state in {"failed", "later"}:
        return found
    own = _verdict(op, Trial(candidate, dtype, device, variant, tuple(problem.items()), config))
    return found if own.state == "passed" else own


def passed(op: OpCandidates, candidate: str, problem: Problem, config: Config, device: torch.device) -> None:
    """A worker has found it right at this very problem: it needs no test of its own."""
    dtype = str(problem.get("dtype", ""))
    for variant in dict.fromkeys(("", trials.variant_of(op, candidate, problem, config, device))):
        trial = Trial(candidate, dtype, device, variant)
        key = _key(op, trial)
        user_database().passed(op.name, candidate, *key[2:], _passed_as(trial))


def set_aside(op: OpCandidates, candidate: str, device: torch.device, reason: str) -> None:
    """Without a test, in this process and every later one: for what showed itself in another way."""
    user_database().quarantine(op.name, candidate, current(device), op.kernel_hash(candidate), reason)
    for known_as in [each for each in _known if each[1:4] == (op.name, candidate, device)]:
        del _known[known_as]


def note(op: OpCandidates, dtype: str, device: torch.device) -> None:
    """While launches are only noted: those of the tests that the op's own kernels will have to pass, if they have not.

    What a model asks for after its first call is tested on its own then, and would be compiled on its own, too.
    """
    assert op.verification is not None
    # Those in HIP are not noted: they are compiled where they are used.
    for candidate in dict.fromkeys(op.verification.proven) if op.verification.kernels else ():
        trial = Trial(candidate, dtype, device)
        if _remembered(_key(op, trial), op, trial) is None:
            _note_launches(op, trial)


def _verdict(op: OpCandidates, trial: Trial) -> SelfTestVerdict:
    known_as = (user_database().path, op.name, trial.candidate, trial.device, trial.dtype, trial.variant)
    known = _known.get(known_as)
    if known is None:
        known = _remembered(_key(op, trial), op, trial) or _now(op, trial)
        if known.state in {"passed", "failed"}:
            _known[known_as] = known
    return known


def _key(op: OpCandidates, trial: Trial) -> _Key:
    """By which it is set aside: a variant for itself, since another may be right."""
    candidate = f"{trial.candidate}: {trial.dtype} {trial.variant}" if trial.variant else trial.candidate
    return op.name, candidate, current(trial.device), op.kernel_hash(trial.candidate)


def _passed_as(trial: Trial) -> str:
    return f"{trial.dtype} {trial.variant}".rstrip()


def _remembered(key: _Key, op: OpCandidates, trial: Trial) -> SelfTestVerdict | None:
    database = user_database()
    with database.reading():
        reason = database.why_quarantined(*key)
        if reason is not None:
            return SelfTestVerdict("failed", reason)
        whole = op.name, trial.candidate, *key[2:]
        return _PASSED if database.has_passed(*whole, _passed_as(trial)) else None


def _now(op: OpCandidates, trial: Trial) -> SelfTestVerdict:
    busy = _why_not_now(trial.device)
    if busy:
        return SelfTestVerdict("later", busy)
    # What is not in Triton would run there, so it is tested first.
    if triton_kernels.skips_launches() and trials.is_noted(op, trial.candidate):
        _note_launches(op, trial)
        _unseen[op.name, trial] = op
        return SelfTestVerdict("unseen")
    log.info("%s is tested once on this card: %s", op.name, trial)
    key, database = _key(op, trial), user_database()
    answer, hung = _answer(op, trial)
    if hung and database.begin_trial(*key) + 1 < _HANGS:
        return SelfTestVerdict("failed", str(answer.reason))
    database.end_trial(*key)
    if answer.reason is None:
        database.passed(op.name, trial.candidate, *key[2:], _passed_as(trial))
        return _PASSED
    if answer.lasting:
        database.quarantine(*key, answer.reason)
    return SelfTestVerdict("failed", answer.reason)


def _answer(op: OpCandidates, trial: Trial) -> tuple[Answer, bool]:
    """The answer, and whether it stands for a hang."""
    if workers.inside():
        # An op that is made of others is wrong where theirs are only noted.
        with triton_kernels.launching():
            prepared = trials.prepare(op, trial)
            return (prepared if prepared.reason else trials.judge(op, trial)), False
    until, why = _unusable.get(trial.device, (0.0, ""))
    if time.monotonic() < until:
        return Answer(why, lasting=False), False
    try:
        with workers.shared() as worker:
            answer, hung = _asked(worker, op, trial)
    except workers.WorkerFailed as failed:
        answer, hung = Answer(f"no worker process could test it: {failed.message}", lasting=False, broken=True), False
    if answer.broken and not answer.lasting:
        _unusable[trial.device] = time.monotonic() + _UNUSABLE_S, str(answer.reason)
    return answer, hung


def _asked(worker: workers.Worker, op: OpCandidates, trial: Trial) -> tuple[Answer, bool]:
    """What is compiled, and what stock's libraries search, has its own time: the candidate's begins after that."""
    answer = Answer()
    for step, seconds in ((trials.prepare, _PREPARE_S), (trials.judge, _JUDGE_S)):
        try:
            answer = worker.call(step, op, trial, timeout=seconds)
        except workers.WorkerLost as lost:
            hung = lost.message.startswith("hung")
            return Answer(f"its test {lost.message}", lasting=not hung or step is trials.judge), hung
        if answer.broken:
            worker.stop()
        if answer.reason is not None:
            break
    return answer, False


def _note_launches(op: OpCandidates, trial: Trial) -> None:
    """What the test will launch is compiled beside what the model launches, and not one by one after it."""
    if (op.name, trial) in _noted:
        return
    _noted.add((op.name, trial))
    with suppress(Exception), torch.no_grad(), torch.autocast(trial.device.type, enabled=False):
        for arguments, config in trials.arguments_of(op, trial):
            trials.run(op, trial.candidate, arguments, config)


def _why_not_now(device: torch.device) -> str | None:
    if torch.compiler.is_compiling():
        return "a call is being traced"
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "a graph is being captured"
    # Tensors may be fake in there, and calls are being counted or noted. Not `is_in_torch_dispatch_mode`: all threads
    # share its flag, and it stays set for good where two of them leave their modes in the order in which they entered.
    return "calls are being noted" if _get_current_dispatch_mode_stack() else None
