"""At first use on a card and its versions: is what a candidate computes there right? One that fails is set aside.

Two calls of the candidate, once for each dtype, and the verdict is remembered in the performance database:
1. a small sample, against the op's definition in float64 on the CPU, by the gate of the proof ladder; the smallest real
   one for a candidate that takes no small ones;
2. a real sample of a million elements or more where the op has one, against stock torch on the same device: there a
   fault shows that strikes one element in a million.
Nothing is drawn from torch's own random numbers, so the picture that is under way stays the same.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from subprocess import SubprocessError
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from rocm_sd.kernels import triton as triton_kernels
from rocm_sd.kernels.hip.launch import HipUnavailable
from rocm_sd.numerics import compare, in_float64, outputs
from rocm_sd.tuning.environment import current
from rocm_sd.tuning.resolve import user_database

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rocm_sd.ops.candidates import OpCandidates
    from rocm_sd.ops.samples import Sample
    from rocm_sd.tuning import Problem
    from rocm_sd.tuning.environment import Environment

    _Key = tuple[str, str, Environment, str]

__all__ = ["SelfTestVerdict", "catch_up", "forget", "note", "set_aside", "verdict"]

log = logging.getLogger("rocm_sd")

MANY = 2**20
# What step 2 may take of a card that is nearly full: elements of all arguments together, 32 MB in half precision.
_LARGEST = 2**24
# Of stock, whose own error grows with the size, and of TF32 where stock uses it, times this much: a fault is grosser.
_MARGIN = 4
_TF32 = 2.0**-10
# A process that dies in a self-test was perhaps only stopped by its user; that it happens twice is no chance.
_DEATHS = 2
# What lies with the machine's set-up, which can change without any version changing: for this process alone.
_SET_UP = (ImportError, OSError, SubprocessError, MemoryError, torch.OutOfMemoryError, HipUnavailable)


@dataclass(frozen=True)
class SelfTestVerdict:
    """`later`: it cannot be tested now, since a graph is captured or a call is traced, and must not be used yet.

    `unseen`: what is launched now is only compiled, and nobody looks at the result: it is to be used, and tested later.
    """

    state: Literal["passed", "failed", "later", "unseen"]
    reason: str = ""


_known: dict[tuple[Any, ...], SelfTestVerdict] = {}
_noted: set[tuple[str, str, str]] = set()
# What a model has used without a test, since its launches were only noted: op, candidate, dtype and device.
_unseen: dict[tuple[str, str, str, torch.device], OpCandidates] = {}


def forget() -> None:
    """What this process knows; the database keeps its own."""
    _known.clear()
    _noted.clear()
    _unseen.clear()


def catch_up() -> None:
    """Test now what was used while launches were only noted.

    Inside the model's real call each test would need its memory beside the model's: in a VAE at the peak of a picture.
    """
    for key in list(_unseen):
        # Another thread may have been here first.
        op = _unseen.pop(key, None)
        if op is not None:
            _, candidate, dtype, device = key
            verdict(op, candidate, {"dtype": dtype}, device)


def verdict(op: OpCandidates, candidate: str, problem: Problem, device: torch.device) -> SelfTestVerdict:
    """From memory, else from the database, else by a test now."""
    dtype = str(problem.get("dtype", ""))
    known_as = (user_database().path, op.name, candidate, device, dtype)
    known = _known.get(known_as)
    if known is None:
        key = (op.name, candidate, current(device), op.kernel_hash(candidate))
        known = _remembered(key, dtype) or _now(op, candidate, dtype, device, key)
        if known.state in {"passed", "failed"}:
            _known[known_as] = known
    return known


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
        if _remembered((op.name, candidate, current(device), op.kernel_hash(candidate)), dtype) is None:
            _note_launches(op, candidate, dtype, device)


def _remembered(key: _Key, dtype: str) -> SelfTestVerdict | None:
    database = user_database()
    reason = database.why_quarantined(*key)
    if reason is not None:
        return SelfTestVerdict("failed", reason)
    return SelfTestVerdict("passed") if database.has_passed(*key, dtype) else None


def _now(op: OpCandidates, candidate: str, dtype: str, device: torch.device, key: _Key) -> SelfTestVerdict:
    busy = _why_not_now(device)
    if busy:
        return SelfTestVerdict("later", busy)
    if triton_kernels.skips_launches():
        _note_launches(op, candidate, dtype, device)
        _unseen[op.name, candidate, dtype, device] = op
        return SelfTestVerdict("unseen")
    database, lasting = user_database(), True
    deaths = database.begin_trial(*key)
    try:
        if deaths >= _DEATHS:
            reason: str | None = f"{deaths} processes ended while they tested it"
        else:
            reason = _why_wrong(op, candidate, dtype, device)
    except Exception as error:  # noqa: BLE001 -- whatever a candidate raises: stock torch runs instead
        reason = _sentence(error)
        lasting = not isinstance(error, _SET_UP) and "C compiler" not in str(error)
    finally:
        database.end_trial(*key)
    if reason is None:
        database.passed(*key, dtype)
        return SelfTestVerdict("passed")
    if lasting:
        database.quarantine(*key, reason)
    return SelfTestVerdict("failed", reason)


def _note_launches(op: OpCandidates, candidate: str, dtype: str, device: torch.device) -> None:
    """What the test will launch is compiled beside what the model launches, and not one by one after it."""
    if (op.name, candidate, dtype) in _noted:
        return
    _noted.add((op.name, candidate, dtype))
    with suppress(Exception), torch.no_grad(), torch.autocast(device.type, enabled=False):
        for real in (False, True):
            sample = _sample(op, candidate, dtype, device, real=real)
            if sample is not None:
                _run(op, candidate, sample.make(device), device)


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _why_not_now(device: torch.device) -> str | None:
    if torch.compiler.is_compiling():
        return "a call is being traced"
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "a graph is being captured"
    # Tensors may be fake in there, and calls are being counted or noted.
    return "calls are being noted" if is_in_torch_dispatch_mode() else None


def _why_wrong(op: OpCandidates, candidate: str, dtype: str, device: torch.device) -> str | None:
    """The reason that its results are not right, or None where they are."""
    small = _sample(op, candidate, dtype, device, real=False) or _least_real(op, candidate, dtype, device)
    if small is None:
        return "it takes none of the calls that it could be tested on"
    log.info("%s (%s) is tested once on this card: %s", op.name, candidate, small.name)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        reason, tolerance = _against_float64(op, candidate, small, device)
        if reason is not None:
            return reason
        real = _sample(op, candidate, dtype, device, real=True)
        return None if real is None else _against_stock(op, candidate, real, device, tolerance)


def _sample(op: OpCandidates, candidate: str, dtype: str, device: torch.device, *, real: bool) -> Sample | None:
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
        fitting = [one for one in _taken(op, candidate, device, several) if one[1] <= _LARGEST]
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
    for sample in samples:
        arguments = sample.make(filled=False)
        if op.implementation(candidate).why_not(op.verification.problem(*arguments), device) is None:
            elements = [a.numel() for a in arguments if isinstance(a, torch.Tensor)]
            yield elements[0], sum(elements), sample


def _cheapest(sized: Iterable[tuple[int, int, Sample]]) -> tuple[int, int, Sample] | None:
    fitting = [one for one in sized if one[1] <= _LARGEST]
    enough = [one for one in fitting if one[0] >= MANY]
    if enough:
        return min(enough, key=lambda one: one[1])
    return max(fitting, key=lambda one: one[0], default=None)


def _run(op: OpCandidates, name: str, arguments: tuple[Any, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    assert op.verification is not None
    implementation = op.implementation(name)
    # The data's config for this very call: that of another size may not fit it.
    problem = op.verification.problem(*arguments)
    shipped = op.lookup(current(device).arch, problem)
    return outputs(implementation(*arguments, config=op.config_at(name, shipped, problem, device)))


def _against_float64(
    op: OpCandidates, candidate: str, sample: Sample, device: torch.device
) -> tuple[str | None, float]:
    """The reason, and what was allowed as a share of the largest value."""
    assert op.verification is not None
    arguments = sample.make(device)
    on_cpu = tuple(a.cpu() if isinstance(a, torch.Tensor) else a for a in arguments)
    # On the CPU, since a card whose libraries are broken would be its own judge.
    exact = outputs(op.verification.reference(*in_float64(on_cpu)))
    stock = [y.cpu() for y in _run(op, op.implementations[0].name, arguments, device)]
    if not all(bool(y.isfinite().all()) for y in stock):
        stock = list(_run(op, op.implementations[0].name, on_cpu, torch.device("cpu")))
    actual = [y.cpu() for y in _run(op, candidate, arguments, device)]
    tolerance = 0.0
    for ours, right, theirs in zip(actual, exact, stock, strict=True):
        if ours.dtype != theirs.dtype:
            return f"at {sample.name}: {ours.dtype} and not {theirs.dtype}", 0.0
        # Another package cannot know what a traced call was promised: stock's layout is the promise.
        if not op.has(candidate) and _layout(ours) != _layout(theirs):
            return f"at {sample.name}: strides {ours.stride()} and not {theirs.stride()}", 0.0
        compared = compare(ours, right, theirs)
        if not compared.ok:
            return f"at {sample.name}: {compared}", 0.0
        largest = float(right.abs().max()) if right.numel() else 0.0
        tolerance = max(tolerance, compared.allowed_largest / largest if largest else 0.0)
    return None, tolerance


def _layout(y: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """Sides and strides; that of a side of one says nothing."""
    return tuple((side, step if side > 1 else 0) for side, step in zip(y.shape, y.stride(), strict=True))


def _against_stock(
    op: OpCandidates, candidate: str, sample: Sample, device: torch.device, tolerance: float
) -> str | None:
    try:
        arguments = sample.make(device)
        stock = _run(op, op.implementations[0].name, arguments, device)
        actual = _run(op, candidate, arguments, device)
        for ours, theirs in zip(actual, stock, strict=True):
            if ours.shape != theirs.shape:
                return f"at {sample.name}: a result of shape {tuple(ours.shape)} and not {tuple(theirs.shape)}"
            largest = float(theirs.abs().max()) if theirs.numel() else 0.0
            allowed = _MARGIN * max(tolerance, _TF32) * largest
            difference = float((ours - theirs).abs_().max()) if theirs.numel() else 0.0
            # Stock that is not finite cannot judge; written so that NaN, which compares false, fails.
            if torch.tensor(largest).isfinite() and not difference <= allowed:
                far = f"{difference:.3g} from stock torch where {allowed:.3g} is allowed"
                return f"at {sample.name}: the worst of {ours.numel()} elements is {far}"
    except torch.OutOfMemoryError:
        # The small sample was right; a card this full is not the candidate's fault.
        log.info("%s (%s): no memory to test it at %s", op.name, candidate, sample.name)
    return None
