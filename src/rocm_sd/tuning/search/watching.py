"""Which problems a model makes: it runs once with every op watched.

While watched, every op computes as stock torch, so nothing that was never tried runs meanwhile; and a model that asks
what an op would choose gets its kernel in one run and stock in another, so that the calls of both ways are seen.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rocm_sd.ops.registry import Op, observed
from rocm_sd.tuning import Choice
from rocm_sd.tuning.choice import STOCK
from rocm_sd.tuning.search.calls import OpCall, Traced, argument_names, describe

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from rocm_sd.tuning import Problem

__all__ = ["Watched", "watched"]


class Watched:
    """Calls by problem. Of calls that differ only in strides or in what is given, the most frequent stands for all."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, Any], Counter[OpCall]] = {}
        self.each = 1  # how often a picture makes what is called now

    def add(self, call: OpCall) -> None:
        self._seen.setdefault((call.op, call.problem), Counter())[call] += self.each

    def traced(self) -> list[Traced]:
        return [Traced(calls.most_common(1)[0][0], calls.total()) for calls in self._seen.values()]


@dataclass(frozen=True)
class _Watch:
    """The observer of a picture: a model that asks for a choice gets the op's kernel, or stock where that is wished."""

    seen: Watched
    answer_stock: bool

    def called(self, op: Op, problem: Problem, arguments: tuple[Any, ...]) -> None:
        self.seen.add(describe(op.name, problem, arguments, argument_names(op.implementations[0].run)))
        for implementation in op.implementations:
            # What it would call is to be tuned before it can be judged.
            if implementation.composed and not op.composed:
                implementation(*arguments)

    def chosen(self, op: Op, problem: Problem, device: torch.device) -> Choice:
        kernel = op.implementation(op.verification.implementation if op.verification else STOCK)
        usable = not self.answer_stock and kernel.why_not(problem, device) is None
        why = "the calls of a picture are being collected"
        return Choice(kernel.name, kernel.default, why=why) if usable else Choice(STOCK, why=why)


def watched(seen: Watched, *, answer_stock: bool) -> AbstractContextManager[None]:
    """Every op computes as stock torch within, and `seen` gets its calls. A choice that is asked for is a fixed one."""
    return observed(_Watch(seen, answer_stock))
