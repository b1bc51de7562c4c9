"""What a worker process of a calibration runs: a model of random weights, timed as one plan has it, beside stock.

`prepare(model, plan, mode)` puts a plan on the model and gives what takes it off, or None where none of the plan's
rules fits the model: it stands above this package. The mode is `captured`, or `none` for no graphs.
"""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from rocm_sd.engine.capture import start_compiling, why_different
from rocm_sd.engine.memory import free_memory, release
from rocm_sd.measuring import LEAST_TURNS, turn
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rocm_sd.engine.calibration.plans import Plan
    from rocm_sd.engine.calibration.skeleton import Rebuilt, Skeleton

    Prepare = Callable[[Any, Plan, str], Callable[[], None] | None]

__all__ = ["get_ready", "time_plan"]

# The weights of two models, and twice as much for what a layout or a packing copies for a moment and for activations.
_ROOMY = 4
# First, second and the calls after it are captured, compared and compared again.
_WARM_UP = 6
_ROUNDS = 8  # or fewer, where the time ends
_ROUND_S = 0.02


@dataclass(frozen=True)
class _Pair:
    """The model that plans are put on, another that stays stock where there is room for it, and what stock computes."""

    ours: Rebuilt
    stock: Rebuilt | None
    expected: list[torch.Tensor]


_kept: dict[bytes, _Pair] = {}  # of this process, by content: as many as there is room for


def _opened(skeleton: Skeleton, device: torch.device) -> _Pair:
    if skeleton.content not in _kept:
        if _is_tight(skeleton, device):
            _kept.clear()
            release(device)
        tight = _is_tight(skeleton, device)
        ours = skeleton.rebuilt(device, share=tight)
        expected = [each.clone() for each in _leaves(ours())]
        _kept[skeleton.content] = _Pair(ours, None if tight else skeleton.rebuilt(device, share=False), expected)
    return _kept[skeleton.content]


def _is_tight(skeleton: Skeleton, device: torch.device) -> bool:
    free = free_memory(device)
    return free is not None and free < _ROOMY * skeleton.weights


def get_ready(modules: Sequence[str], device: torch.device | None, skeleton: Skeleton | None) -> None:
    """Import what a model's classes need, open the card with its libraries and rebuild the model that is timed first,
    while others work: each takes seconds.

    Without a device the card's memory is left to others.
    """
    for name in modules:
        import_module(name)
    if device is not None and device.type == "cuda" and skeleton is not None:
        start_compiling(device, tests=False)
        # What keeps it from being rebuilt is said when it is timed, and of that model alone.
        with suppress(Exception), torch.no_grad():
            _opened(skeleton, device)
            torch.cuda.synchronize(device)


def time_plan(
    skeleton: Skeleton, device: torch.device, plan: Plan, prepare: Prepare, graphs: bool, seconds: float
) -> dict[str, Any]:
    """Milliseconds of one call in a row of calls, host and card together, and stock's in turns with them; or the
    reason that its result is wrong; or nothing, where no rule fits the model and the plan is another one's.

    `seconds`: for all of it; what is slow is timed in fewer turns, and not in less than it takes to tell. The answer
    has the seconds of each stage as `stages`.
    """
    end = time.monotonic() + seconds
    stages: dict[str, float] = {}
    with torch.no_grad():
        with _stage("rebuilt", stages):
            pair = _opened(skeleton, device)
        if plan.name == STOCK:
            return {**_timed({"ours": pair.ours}, device, end), "stages": stages}
        with _stage("prepared", stages):
            take_off = prepare(pair.ours.model, plan, "captured" if graphs and plan.captured else "none")
        if take_off is None:
            return {}
        try:
            for number in range(_WARM_UP):
                with _stage(f"call {min(number + 1, 3)}", stages):
                    result = pair.ours()
                    _synchronize(device)
            wrong = why_different(_leaves(result), pair.expected)
            if wrong is not None:
                return {"wrong": f"its result differs from stock's {wrong}"}
            calls = {"ours": pair.ours} if pair.stock is None else {"stock": pair.stock, "ours": pair.ours}
            with _stage("timed", stages):
                return {**_timed(calls, device, end), "stages": stages}
        finally:
            take_off()


@contextmanager
def _stage(name: str, stages: dict[str, float]) -> Iterator[None]:
    begun = time.monotonic()
    try:
        yield
    finally:
        stages[name] = round(stages.get(name, 0.0) + time.monotonic() - begun, 2)


def _timed(calls: Mapping[str, Callable[[], Any]], device: torch.device, end: float) -> dict[str, Any]:
    once = {who: _round(call, device, 1) for who, call in calls.items()}
    counts = {who: max(1, round(_ROUND_S / taken)) for who, taken in once.items()}
    times: dict[str, list[float]] = {who: [] for who in calls}
    fitting = (end - time.monotonic()) / sum(counts[who] * taken for who, taken in once.items())
    for number in range(max(LEAST_TURNS, min(_ROUNDS, int(fitting)))):
        for who in turn(list(calls), number):
            times[who].append(1e3 * _round(calls[who], device, counts[who]))
    return times


def _round(call: Callable[[], Any], device: torch.device, count: int) -> float:
    _synchronize(device)
    begun = time.perf_counter()
    for _ in range(count):
        call()
    _synchronize(device)
    return (time.perf_counter() - begun) / count


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _leaves(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
