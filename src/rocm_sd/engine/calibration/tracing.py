"""Which problems a model's call makes with all rules, channels-last, whatever runs here today.

The model itself is run, in the user's process: while watched, every op computes as stock torch. What was put on it is
taken off again, so it is as before.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.engine.convolutions import lay_out
from rocm_sd.rewrite import RULES, RULES_FOR_GRAPHS, apply, undo
from rocm_sd.tuning.search.watching import Watched, watched

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

__all__ = ["trace_call"]

_GROUP_OFFLOADING = "group_offloading"


def trace_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], seen: Watched) -> float:
    """Add the problems to `seen`; the answer is how many seconds a call took, the second one.

    Graphs and hooks of the model itself are passed by, since a hook may count calls: its class's forward is called. An
    offload's hook brings weights to the device, and is not.
    """
    forward: Any = type(model).forward
    with torch.no_grad(), _brought(model, args, kwargs) as (positional, named):
        laid_out = lay_out([model], "")
        changes = apply(model, (*RULES, *RULES_FOR_GRAPHS))
        try:
            # A model asks what an op would choose: it gets the kernel once, and stock once.
            for answer_stock in (False, True):
                with watched(seen, answer_stock=answer_stock):
                    begun = time.perf_counter()
                    forward(model, *positional, **named)
                    _wait_for(positional, named)
                    taken = time.perf_counter() - begun
        finally:
            undo(changes)
            laid_out.restore()
    return taken


@contextmanager
def _brought(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[tuple[Any, ...], Mapping[str, Any]]]:
    """The arguments as a group offload by Diffusers hands them on, with the weights on the device within.

    accelerate's hooks have done so before: what this project puts on a model goes inside of them.
    """
    registry: Any = model.__dict__.get("_diffusers_hook")
    hook = None if registry is None else registry.hooks.get(_GROUP_OFFLOADING)
    if hook is None:
        yield args, kwargs
        return
    given = hook.pre_forward(model, *args, **kwargs)
    try:
        yield given
    finally:
        hook.post_forward(model, None)


def _wait_for(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    device = next((each.device for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)), None)
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
