"""What a self-test computes: `prepare` does all but the candidate's own run, and `judge` runs and compares it.

A trial of a candidate in one dtype has two calls:
1. a small sample, against the op's definition in float64 on the CPU, by the gate of the proof ladder; the smallest real
   one for a candidate that takes no small ones;
2. a real sample of a million elements or more where the op has one, against stock torch on the same device: there a
   fault shows that strikes one element in a million.
A trial of one variant of its code has one call, against stock torch: with the config and the problem that are to run,
or with a smaller one of the same variant. Nothing is drawn from torch's own random numbers.
"""

from __future__ import annotations

import logging
import os
import traceback
from contextlib import ExitStack
from dataclasses import dataclass, replace
from subprocess import SubprocessError
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd import plugging
from rocm_sd.errors import RocmSdError
from rocm_sd.kernels import hip
from rocm_sd.kernels.config import NO_CONFIG
from rocm_sd.kernels.hip.launch import HipUnavailable
from rocm_sd.numerics import compare, in_float64, outputs
from rocm_sd.tuning.environment import current

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rocm_sd.kernels.config import Config
    from rocm_sd.ops.candidates import OpCandidates
    from rocm_sd.ops.samples import Sample
    from rocm_sd.tuning import Problem

__all__ = [
    "Answer", "Trial", "arguments_of", "get_ready", "is_noted", "judge", "prepare", "run", "sample", "variant_of",
]  # fmt: skip

log = logging.getLogger("rocm_sd")

MANY = 2**20
# What a real sample may take of a card that is nearly full: elements of all arguments, 32 MB in half precision.
LARGEST = 2**24
# A variant is met by the weights that the model has: up to 128 MB.
_LARGEST_VARIANT = 2**26
# Of stock, whose own error grows with the size, and of TF32 where stock uses it, times this much: a fault is grosser.
_MARGIN = 4
_TF32 = 2.0**-10
# What lies with the machine's set-up, which can change without any version changing: for this process alone.
_SET_UP = (ImportError, OSError, SubprocessError, MemoryError, torch.OutOfMemoryError, HipUnavailable)


class NothingToTry(RocmSdError):
    """None of the op's samples is one that the candidate takes."""


@dataclass(frozen=True)
class Trial:
    """`variant` is empty where the candidate itself is tried; else its code as `problem` runs it with `config`."""

    candidate: str
    dtype: str
    device: torch.device
    variant: str = ""
    problem: tuple[tuple[str, int | str], ...] = ()
    config: Config = NO_CONFIG

    def __str__(self) -> str:
        return f"{self.candidate}, {self.dtype}{f', {self.variant}' if self.variant else ''}"


@dataclass(frozen=True)
class Answer:
    """The reason that a candidate is not right, or None where it is.

    `lasting`: it will not be otherwise in the next process. `broken`: the process cannot use its device any more.
    """

    reason: str | None = None
    lasting: bool = True
    broken: bool = False


@dataclass
class _Call:
    """One call of a trial; `exact` is its result in float64, where that is asked for."""

    name: str
    arguments: tuple[Any, ...]
    config: Config
    stock: tuple[torch.Tensor, ...]
    exact: tuple[torch.Tensor, ...] | None = None


def variant_of(op: OpCandidates, candidate: str, problem: Problem, config: Config, device: torch.device) -> str:
    """The config in numbers and what the op says of its code; nothing where one kernel serves every problem."""
    said = op.implementation(candidate).variant
    if said is None or not config:
        return ""
    return f"{'.'.join(map(str, config.to_dict().values()))} {said(problem, config, device)}"


def is_noted(op: OpCandidates, candidate: str) -> bool:
    """Whether all kernels of it are in Triton: those alone are skipped where launches are only noted."""
    assert op.verification is not None
    return bool(op.verification.kernels) and candidate in op.verification.proven


def get_ready(device: torch.device) -> None:
    """What takes seconds in a new process: its context on the card, and Triton."""
    torch.zeros(8, device=device).sum().item()
    if device.type == "cuda":
        from rocm_sd.kernels.triton import precompile  # noqa: F401, PLC0415 -- where Triton is missing, so be it


_ready: dict[tuple[str, Trial], list[_Call]] = {}


def prepare(op: OpCandidates, trial: Trial) -> Answer:
    """Arguments, what is right, and on a GPU the candidate's kernels, compiled: cold compilers may take minutes."""
    _ready.clear()
    try:
        with torch.no_grad(), torch.autocast(trial.device.type, enabled=False):
            calls = _calls(op, trial)
            if trial.device.type == "cuda":
                for call in calls:
                    _compile(op, trial, call)
                torch.cuda.synchronize(trial.device)
    except plugging.FAULTS as error:  # whatever it raises: stock torch runs instead
        return _failed(error, trial.device)
    _ready[op.name, trial] = calls
    return Answer()


def judge(op: OpCandidates, trial: Trial) -> Answer:
    """Run the candidate on what was prepared."""
    calls = _ready.pop((op.name, trial))
    tolerance = 2 * torch.finfo(getattr(torch, trial.dtype, torch.float32)).eps
    try:
        with torch.no_grad(), torch.autocast(trial.device.type, enabled=False):
            for call in calls:
                actual = run(op, trial.candidate, call.arguments, call.config)
                if call.exact is not None:
                    reason, tolerance = _against_float64(op, trial.candidate, call, actual)
                else:
                    reason = _against_stock(call, actual, tolerance)
                if reason is not None:
                    return Answer(f"at {call.name}: {reason}")
    except plugging.FAULTS as error:  # as above
        return _failed(error, trial.device)
    finally:
        calls.clear()
        if trial.device.type == "cuda" and not _is_broken(trial.device):
            torch.cuda.empty_cache()
    return Answer()


def _failed(error: BaseException, device: torch.device) -> Answer:
    if isinstance(error, NothingToTry):
        return Answer(error.message)
    traceback.print_exc()
    lines = str(error).strip().splitlines()
    sentence = f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
    # A second context, or what it holds, did not fit beside the model: torch has two errors for that.
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
        return Answer(f"no memory is left on {device} to test it: {sentence}", lasting=False, broken=_is_broken(device))
    lasting = not isinstance(error, _SET_UP) and "C compiler" not in str(error)
    return Answer(sentence, lasting, _is_broken(device))


def _is_broken(device: torch.device) -> bool:
    """After an access outside of its memory, a GPU gives every later call of the process the same error."""
    if device.type != "cuda":
        return False
    try:
        torch.zeros(8, device=device).sum().item()
    except RuntimeError:
        return True
    return False


def _calls(op: OpCandidates, trial: Trial) -> list[_Call]:
    stock = op.implementations[0].name
    if trial.variant:
        return [_of_variant(op, trial)]
    device = trial.device
    small = sample(op, trial.candidate, trial.dtype, device, real=False)
    small = small or _least_real(op, trial.candidate, trial.dtype, device)
    if small is None:
        raise NothingToTry("it takes none of the calls that it could be tested on")
    assert op.verification is not None
    arguments = small.make(device)
    on_cpu = tuple(a.cpu() if isinstance(a, torch.Tensor) else a for a in arguments)
    # On the CPU, since a card whose libraries are broken would be its own judge.
    exact = outputs(op.verification.reference(*in_float64(on_cpu)))
    yardstick = tuple(y.cpu() for y in run(op, stock, arguments, _data_config(op, stock, arguments, device)))
    if not all(bool(y.isfinite().all()) for y in yardstick):
        yardstick = run(op, stock, on_cpu, _data_config(op, stock, on_cpu, torch.device("cpu")))
    calls = [_Call(small.name, arguments, _data_config(op, trial.candidate, arguments, device), yardstick, exact)]
    real = sample(op, trial.candidate, trial.dtype, device, real=True)
    if real is not None:
        try:
            arguments = real.make(device)
            config = _data_config(op, trial.candidate, arguments, device)
            calls.append(_Call(real.name, arguments, config, run(op, stock, arguments)))
        except torch.OutOfMemoryError:
            # The small sample judges; a card this full is not the candidate's fault.
            log.info("%s (%s): no memory to test it at %s", op.name, trial.candidate, real.name)
    return calls


def _of_variant(op: OpCandidates, trial: Trial) -> _Call:
    """The nearest call of the variant that the card has room for."""
    assert op.verification is not None
    assert op.verification.similar is not None
    full: torch.OutOfMemoryError | None = None
    for each in op.verification.similar(dict(trial.problem)):
        if not _is_variant(op, trial, each):
            continue
        try:
            arguments = each.make(trial.device)
            return _Call(each.name, arguments, trial.config, run(op, op.implementations[0].name, arguments))
        except torch.OutOfMemoryError as error:
            full = error
    raise full or NothingToTry(f"no call of its variant {trial.variant} is small enough to be tested")


def _is_variant(op: OpCandidates, trial: Trial, like: Sample) -> bool:
    assert op.verification is not None
    arguments = like.make(filled=False)
    if sum(a.numel() for a in arguments if isinstance(a, torch.Tensor)) > _LARGEST_VARIANT:
        return False
    problem = op.verification.problem(*arguments)
    if op.implementation(trial.candidate).why_not(problem, trial.device) is not None:
        return False
    return variant_of(op, trial.candidate, problem, trial.config, trial.device) == trial.variant


def arguments_of(op: OpCandidates, trial: Trial) -> Iterator[tuple[tuple[Any, ...], Config]]:
    """(arguments, config) of each call of a trial, for those who compile ahead; what cannot be made is left out."""
    assert op.verification is not None
    if trial.variant:
        found = op.verification.similar(dict(trial.problem)) if op.verification.similar is not None else ()
        samples = [each for each in found if _is_variant(op, trial, each)][:1]
    else:
        both = (sample(op, trial.candidate, trial.dtype, trial.device, real=real) for real in (False, True))
        samples = [each for each in both if each is not None]
    for each in samples:
        arguments = each.make(trial.device, filled=False)
        yield arguments, trial.config or _data_config(op, trial.candidate, arguments, trial.device)


def _compile(op: OpCandidates, trial: Trial, call: _Call) -> None:
    """Compile what the candidate launches, and launch none of it; libraries and plug-ins compile when they run."""
    own = op.own.get(trial.candidate)
    with ExitStack() as stack:
        if own is not None and own.kernels is not None:
            stack.enter_context(hip.only_loading(trial.device))
        elif is_noted(op, trial.candidate):
            from rocm_sd.kernels.triton import precompile  # noqa: PLC0415 -- needs Triton

            stack.enter_context(precompile.precompiling(max(2, os.cpu_count() or 2), forks=False))
        else:
            return
        run(op, trial.candidate, call.arguments, call.config)


def sample(op: OpCandidates, candidate: str, dtype: str, device: torch.device, *, real: bool) -> Sample | None:
    """Of those that it takes, the one with most elements; of real ones the cheapest that has a million."""
    assert op.verification is not None
    calls = list(op.verification.calls(real=real))
    own = [sample for name, sample in calls if name == candidate]
    known = [sample for _, sample in calls]
    # Small ones of its own before those of the op.
    for samples in (known,) if real else (own, known):
        for several in _in_dtype(samples, dtype):
            sized = list(_taken(op, candidate, device, several))
            chosen = _cheapest(sized) if real else max(sized, key=lambda one: one[0], default=None)
            if chosen is not None:
                return chosen[2]
    return None


def _least_real(op: OpCandidates, candidate: str, dtype: str, device: torch.device) -> Sample | None:
    """For one that is made for large calls alone: the smallest of those that a model makes."""
    assert op.verification is not None
    samples = [sample for _, sample in op.verification.calls(real=True)]
    if op.tuning is not None:
        samples += [*(bucket.sample for bucket in op.tuning.buckets), *op.tuning.timed]
    for several in _in_dtype(samples, dtype):
        fitting = [one for one in _taken(op, candidate, device, several) if one[1] <= LARGEST]
        if fitting:
            return min(fitting, key=lambda one: one[1])[2]
    return None


def _in_dtype(samples: list[Sample], dtype: str) -> tuple[list[Sample], list[Sample]]:
    """Those in the dtype that is asked for, and then all of them, turned to it."""
    wanted = getattr(torch, dtype, None)
    given = [sample for sample in samples if sample.dtype is wanted]
    return given, [sample if wanted is None else replace(sample, dtype=wanted) for sample in samples]


def _taken(
    op: OpCandidates, candidate: str, device: torch.device, samples: Iterable[Sample]
) -> Iterator[tuple[int, int, Sample]]:
    """(elements of the first tensor, of all tensors, sample): the first is what an op transforms."""
    assert op.verification is not None
    for each in samples:
        arguments = each.make(filled=False)
        if op.implementation(candidate).why_not(op.verification.problem(*arguments), device) is None:
            elements = [a.numel() for a in arguments if isinstance(a, torch.Tensor)]
            yield elements[0], sum(elements), each


def _cheapest(sized: Iterable[tuple[int, int, Sample]]) -> tuple[int, int, Sample] | None:
    fitting = [one for one in sized if one[1] <= LARGEST]
    enough = [one for one in fitting if one[0] >= MANY]
    if enough:
        return min(enough, key=lambda one: one[1])
    return max(fitting, key=lambda one: one[0], default=None)


def _data_config(op: OpCandidates, name: str, arguments: tuple[Any, ...], device: torch.device) -> Config:
    """The data's config for this very call: that of another size may not fit it."""
    assert op.verification is not None
    problem = op.verification.problem(*arguments)
    return op.config_at(name, op.lookup(current(device).arch, problem), problem, device)


def run(
    op: OpCandidates, name: str, arguments: tuple[Any, ...], config: Config = NO_CONFIG
) -> tuple[torch.Tensor, ...]:
    return outputs(op.implementation(name)(*arguments, config=config))


def _against_float64(
    op: OpCandidates, candidate: str, call: _Call, results: tuple[torch.Tensor, ...]
) -> tuple[str | None, float]:
    """The reason, and what was allowed as a share of the largest value."""
    assert call.exact is not None
    tolerance = 0.0
    for ours, right, theirs in zip((y.cpu() for y in results), call.exact, call.stock, strict=True):
        if ours.dtype != theirs.dtype:
            return f"{ours.dtype} and not {theirs.dtype}", 0.0
        # Another package cannot know what a traced call was promised: stock's layout is the promise.
        if not op.has(candidate) and _layout(ours) != _layout(theirs):
            return f"strides {ours.stride()} and not {theirs.stride()}", 0.0
        compared = compare(ours, right, theirs)
        if not compared.ok:
            return str(compared), 0.0
        largest = float(right.abs().max()) if right.numel() else 0.0
        tolerance = max(tolerance, compared.allowed_largest / largest if largest else 0.0)
    return None, tolerance


def _layout(y: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """Sides and strides; that of a side of one says nothing."""
    return tuple((side, step if side > 1 else 0) for side, step in zip(y.shape, y.stride(), strict=True))


def _against_stock(call: _Call, results: tuple[torch.Tensor, ...], tolerance: float) -> str | None:
    for ours, theirs in zip(results, call.stock, strict=True):
        if ours.shape != theirs.shape:
            return f"a result of shape {tuple(ours.shape)} and not {tuple(theirs.shape)}"
        largest = float(theirs.abs().max()) if theirs.numel() else 0.0
        allowed = _MARGIN * max(tolerance, _TF32) * largest
        difference = float((ours - theirs).abs_().max()) if theirs.numel() else 0.0
        # Stock that is not finite cannot judge; written so that NaN, which compares false, fails.
        if torch.tensor(largest).isfinite() and not difference <= allowed:
            far = f"{difference:.3g} from stock torch where {allowed:.3g} is allowed"
            return f"the worst of {ours.numel()} elements is {far}"
    return None
