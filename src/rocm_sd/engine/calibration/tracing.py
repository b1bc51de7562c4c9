"""Which problems a model's call makes with all rules, channels-last, whatever runs here today.

The model itself is run, in the user's process: while watched, every op computes as stock torch. What was put on it is
taken off again, so it is as before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.engine.convolutions import lay_out
from rocm_sd.rewrite import RULES, RULES_FOR_GRAPHS, apply, undo
from rocm_sd.tuning.search.watching import Watched, watched

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

__all__ = ["trace_call"]


def trace_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], seen: Watched) -> None:
    """Add the problems to `seen`. Graphs and hooks of the model itself are passed by: its class's forward is called."""
    forward: Any = type(model).forward
    with torch.no_grad():
        laid_out = lay_out([model], "")
        changes = apply(model, (*RULES, *RULES_FOR_GRAPHS))
        try:
            # A model asks what an op would choose: it gets the kernel once, and stock once.
            for answer_stock in (False, True):
                with watched(seen, answer_stock=answer_stock):
                    forward(model, *args, **kwargs)
        finally:
            undo(changes)
            laid_out.restore()
