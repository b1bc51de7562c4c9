"""Rung 5 on the device at hand: what an implementation of an op computes there, and how long one real call takes.

Every small call is compared with the definition in float64, on the CPU: a card whose libraries are broken would be its
own judge. On a GPU one real call is compared, too, and timed in turns with stock torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd import arch, numerics
from rocm_sd.measuring import Stopwatch, interleaved
from rocm_sd.numerics import in_float64, outputs
from rocm_sd.ops import trials
from rocm_sd.ops.samples import dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rocm_sd.ops.registry import Op
    from rocm_sd.ops.samples import Sample

__all__ = ["Judged", "judge", "runs_here"]

_TURNS = 15


@dataclass(frozen=True)
class Judged:
    """`sentence`: of the worst call, or why nothing was compared. `right` is None where the card takes no call."""

    right: bool | None
    sentence: str
    figures: dict[str, float | str] = field(default_factory=dict)


def runs_here(op: Op, name: str, device: torch.device) -> str | None:
    """None where the implementation takes one of the op's calls on this device; else why it does not."""
    assert op.verification is not None
    why = "it has no call that is for this architecture"
    for sample in _samples(op, device):
        reason = op.implementation(name).why_not(op.verification.problem(*sample.make(filled=False)), device)
        if reason is None:
            return None
        why = reason
    return why


def judge(op: Op, name: str, device: torch.device) -> Judged:
    """Of one implementation, by name. Whatever it raises is the caller's to report."""
    with torch.no_grad():
        compared = list(_compared(op, name, device))
        if not compared:
            return Judged(None, runs_here(op, name, device) or "none of its calls could be made")
        _, sample, comparison = max(compared, key=lambda each: each[0])
        figures: dict[str, float | str] = {"samples": len({each[1].name for each in compared})}
        if comparison.largest < float("inf"):  # written so that NaN, which JSON has not, stays out
            figures |= {"largest_error": comparison.largest, "allowed": comparison.allowed_largest}
        sentence = f"{sample.name}: {comparison}"
        if not comparison.ok or device.type == "cpu":
            return Judged(comparison.ok, sentence, figures)
        wrong, timed = _real(op, name, device)
        return Judged(wrong is None, wrong or sentence, figures | timed)


def _samples(op: Op, device: torch.device) -> list[Sample]:
    assert op.verification is not None
    found = (sample for _, sample in op.verification.calls(arch=arch.detect(device)))
    return list({sample.name: sample for sample in found}.values())


def _call(op: Op, name: str, arguments: tuple[Any, ...], device: torch.device) -> Any:
    """With the config that dispatch would give it."""
    assert op.verification is not None
    problem = op.verification.problem(*arguments)
    config = op.config_at(name, op.lookup(arch.detect(device).name, problem), problem, device)
    return op.implementation(name)(*arguments, config=config)


def _compared(op: Op, name: str, device: torch.device) -> Iterator[tuple[float, Sample, numerics.Comparison]]:
    """(how bad, sample, comparison) of each output."""
    assert op.verification is not None
    stock = op.implementations[0].name
    for sample in _samples(op, device):
        arguments = sample.make(device)
        if op.implementation(name).why_not(op.verification.problem(*arguments), device) is not None:
            continue
        on_cpu = tuple(each.cpu() if isinstance(each, torch.Tensor) else each for each in arguments)
        exact = outputs(op.verification.reference(*in_float64(on_cpu)))
        yardstick = outputs(_call(op, stock, on_cpu, torch.device("cpu")))
        for three in zip(outputs(_call(op, name, arguments, device)), exact, yardstick, strict=True):
            comparison = numerics.compare(three[0].cpu(), *three[1:])
            # A NaN error compares as nothing does, so a failed sample counts as the worst by itself.
            bad = comparison.largest / (comparison.allowed_largest or 1.0) if comparison.ok else float("inf")
            yield bad, sample, comparison


def _real(op: Op, name: str, device: torch.device) -> tuple[str | None, dict[str, float | str]]:
    """Why a call of a real size is wrong, or None; and microseconds of it and of stock, cold and in turns."""
    stock = op.implementations[0].name
    sample = trials.sample(op, name, "float16", device, real=True)
    if sample is None:
        return None, {}
    arguments = sample.make(device)
    calls = {each: partial(_call, op, each, arguments, device) for each in dict.fromkeys((stock, name))}
    wrong = _why_wrong(op, sample, arguments, *(outputs(calls[each]()) for each in (name, stock)))
    if wrong is not None:
        return f"{sample.name}: {wrong}", {}
    watch = Stopwatch(device, cold=True, queued=True)
    interleaved(calls, watch, repeats=2)
    times = interleaved(calls, watch, repeats=_TURNS)
    figures: dict[str, float | str] = {"timed": f"{sample.name}, {dtype_name(sample.dtype)}"[:200]}
    return None, figures | {
        "us": round(1e3 * median(times[name]), 3),
        "stock_us": round(1e3 * median(times[stock]), 3),
    }


def _why_wrong(
    op: Op,
    sample: Sample,
    arguments: tuple[Any, ...],
    ours: tuple[torch.Tensor, ...],
    stock: tuple[torch.Tensor, ...],
) -> str | None:
    for one, exact, theirs in zip(ours, _exact(op, sample, arguments), stock, strict=True):
        if one.shape != exact.shape:
            return f"a result of shape {tuple(one.shape)} and not {tuple(exact.shape)}"
        if not bool(one.isfinite().all()):
            return "its result is not finite"
        comparison = numerics.compare(one.cpu(), exact, theirs.cpu())
        # Stock that is not finite cannot judge others.
        if bool(theirs.isfinite().all()) and not comparison.ok:
            return str(comparison)
    return None


_kept: dict[tuple[str, str], tuple[torch.Tensor, ...]] = {}


def _exact(op: Op, sample: Sample, arguments: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """On the CPU: few cards are quick in float64, and not every library of theirs has it. Kept for the op's others."""
    assert op.verification is not None
    known_as = (op.name, sample.name)
    if known_as not in _kept:
        _kept.clear()
        on_cpu = tuple(each.cpu() if isinstance(each, torch.Tensor) else each for each in arguments)
        _kept[known_as] = outputs(op.verification.reference(*in_float64(on_cpu)))
    return _kept[known_as]
