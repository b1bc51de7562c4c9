"""Which parts of the engine are put to use: all of them, but where an ablation adds one after the other."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocm_sd import settings
from rocm_sd.rewrite.packing import packing

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["EVERYTHING", "Parts"]


@dataclass(frozen=True)
class Parts:
    """`rules`: by name, or None for all; `stock_ops`: those whose stock implementation runs; `packed`: QKV and text KV.

    `captured`: forwards are answered from graphs; `hoisted`: what depends on the prompt or the timestep alone is made
    once a run. Without both, calls go to the modules themselves. `encoders`: calls of text encoders and the safety
    checker are captured, too. `hook_questions`: Diffusers' questions for hooks are answered without a walk over all
    modules. `plan`: that one by name for all models, where None leaves it to what was measured or is shipped;
    `calibrated`: a model without a plan is measured at its first call.
    """

    rules: frozenset[str] | None = None
    stock_ops: frozenset[str] = frozenset()
    channels_last: bool = True
    convolution_library: bool = True
    packed: bool = True
    hoisted: bool = True
    captured: bool = True
    encoders: bool = True
    hook_questions: bool = True
    plan: str | None = None
    calibrated: bool = True

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Around each call of a model that was optimised with these parts alone."""
        with settings.stock_implementations(self.stock_ops), packing(allowed=self.packed):
            yield


EVERYTHING = Parts()
