"""What the worker process of a calibration runs: a model of random weights, traced, or timed by one plan.

`prepare(model, plan, mode)` puts a plan on the model and gives what takes it off: it stands above this package. The
mode is `captured`, `none` (no graphs), or `hoisted` (as for a graph, and launched one by one).
"""

from __future__ import annotations

import time
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from rocm_sd.engine.calibration.plans import CHANNELS_LAST
from rocm_sd.engine.memory import free_memory, release
from rocm_sd.tuning.search.watching import Watched, watched

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_sd.engine.calibration.plans import Plan
    from rocm_sd.engine.calibration.skeleton import Rebuilt, Skeleton
    from rocm_sd.tuning.search.calls import Traced

    Prepare = Callable[[Any, Plan, str], Callable[[], None]]

__all__ = ["time_plan", "trace"]

# The weights twice over, since a layout or a packing is a copy for a moment, and as much for activations.
_ROOMY = 3
# First, second and the calls after it are captured, compared and compared again.
_WARM_UP = 8
_ROUNDS = 5
_ROUND_S = 0.04
# As of a graph and its model: products of other shapes round in another order.
_ROUNDINGS = 32.0

_kept: list[tuple[bytes, Rebuilt]] = []  # of this process, at most one
_stock: dict[bytes, list[torch.Tensor]] = {}


def _opened(skeleton: Skeleton, device: torch.device) -> Rebuilt:
    if not _kept or _kept[0][0] != skeleton.content:
        close()
        release(device)
        free = free_memory(device)
        share = free is not None and free < _ROOMY * skeleton.weights
        _kept.append((skeleton.content, skeleton.rebuilt(device, share=share)))
    return _kept[0][1]


def close() -> None:
    """Give the memory back."""
    _kept.clear()
    _stock.clear()


def trace(skeleton: Skeleton, device: torch.device, prepare: Prepare) -> list[Traced]:
    """Every problem that the model makes with all rules, channels-last, whatever runs here today."""
    seen = Watched()
    with torch.no_grad():
        rebuilt = _opened(skeleton, device)
        for mode, answer_stock in product(("hoisted", "none"), (False, True)):
            take_off = prepare(rebuilt.model, CHANNELS_LAST, mode)
            try:
                # The first call lays out what is laid out once, and the second is as all that follow.
                with watched(Watched(), answer_stock=answer_stock):
                    rebuilt()
                with watched(seen, answer_stock=answer_stock):
                    rebuilt()
            finally:
                take_off()
    return seen.traced()


def time_plan(skeleton: Skeleton, device: torch.device, plan: Plan, prepare: Prepare, graphs: bool) -> dict[str, Any]:
    """Milliseconds of one call in a row of calls, host and card together, or the reason that its result is wrong."""
    with torch.no_grad():
        rebuilt = _opened(skeleton, device)
        if skeleton.content not in _stock:
            _stock[skeleton.content] = [each.clone() for each in _leaves(rebuilt())]
        take_off = prepare(rebuilt.model, plan, "captured" if graphs and plan.captured else "none")
        try:
            for _ in range(_WARM_UP):
                result = rebuilt()
            wrong = _why_wrong(_leaves(result), _stock[skeleton.content])
            if wrong is not None:
                return {"wrong": wrong}
            return {"ms": _timed(rebuilt, device)}
        finally:
            take_off()


def _timed(call: Callable[[], Any], device: torch.device) -> list[float]:
    one = _round(call, device, 2)
    count = max(2, round(_ROUND_S / one))
    return [1e3 * _round(call, device, count) for _ in range(_ROUNDS)]


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


def _why_wrong(ours: list[torch.Tensor], stock: list[torch.Tensor]) -> str | None:
    for mine, theirs in zip(ours, stock, strict=True):
        exact = theirs.double()
        apart = float((mine.double() - exact).norm()) / max(float(exact.norm()), 1e-30)
        allowed = _ROUNDINGS * max(torch.finfo(theirs.dtype).eps, 2.0**-10 if theirs.is_cuda else 0.0)
        if not apart <= allowed:
            return f"its result is {apart:.1e} of its norm from stock's, and {allowed:.1e} is allowed"
    return None
