"""What a graph has to show before it is used: that its first replays are right, and that it is faster than eager runs.

The first replay is held against the model's own forward, the next three against eager runs, on inputs that change each
time: ROCm has read what a buffer held before it was last written (ROCm/hip#3902), or stale pointers (ROCm/hip#3887),
and one process in five was wrong on some releases (ROCm/clr#279). Both are timed on the way. A kind of call is captured
whole first. Where that cannot be done or is wrong, as blocks; where these are no better, not at all. A capture that
fails is tried once more: MIOpen polls streams while others capture (ROCm/rocm-libraries#12121).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CHECKED_REPLAYS", "Attempts", "NotAdopted", "Trial", "why_different"]

# The one at the capture, and three on changed inputs.
CHECKED_REPLAYS = 4
# Of the reference's norm, in units of the dtype's rounding. Products of other shapes round in another order: a whole
# UNet differs by 2 units in float16 and by 8 in float32. A graph that reads the wrong memory differs by all of it.
_ROUNDINGS = 32.0
# A later replay has the kernels of an eager run and, nearly everywhere, its bits. Kernels that add in no fixed order
# differ at the first replay already.
_LATER_ROUNDINGS = 1.0
_OF_THE_FIRST = 4.0
# Two medians of three are not told apart within 2%; between equals a graph leaves the host free.
_SAME = 1.02
_TRIES_OF_A_CAPTURE = 2


class NotAdopted(Exception):
    """Why a graph is not used, in words. `again`: whether the same may work at another time."""

    def __init__(self, reason: str, *, again: bool = False) -> None:
        super().__init__(reason)
        self.again = again


@dataclass
class Attempts:
    """What was tried for one kind of call: `in_blocks` is how it is captured next, for `reasons`."""

    in_blocks: bool = False
    reasons: list[str] = field(default_factory=list)
    _failed: int = 0

    def after(self, error: NotAdopted) -> str | None:
        """What comes next, in words; None where nothing is left."""
        reason = f"in blocks, {error}" if self.in_blocks else str(error)
        if reason not in self.reasons:
            self.reasons.append(reason)
        self._failed += error.again
        if error.again and self._failed < _TRIES_OF_A_CAPTURE:
            return "the capture is tried once more"
        if self.in_blocks:
            return None
        self.in_blocks, self._failed = True, 0
        return "it is captured in blocks"

    @property
    def why(self) -> str:
        return "; ".join(self.reasons)


@dataclass
class Trial:
    """Of one graph, whose first replay was so far from an eager run. Milliseconds of the turns of both."""

    first: float
    graph_ms: list[float] = field(default_factory=list)
    eager_ms: list[float] = field(default_factory=list)

    @classmethod
    def begun(cls, replayed: Any, model: Any, eager: Callable[[], Any]) -> Trial:
        """After the first replay; `model`: the model's own answer; `eager` gives an eager run's. Raises NotAdopted."""
        differs = why_different(replayed, model)
        if differs is not None:
            raise NotAdopted(f"its replay differs from the model's forward {differs}")
        # Where nothing is prepared in advance, the model's own answer has the same bits.
        return cls(_distance(replayed, model) and _distance(replayed, eager()))

    def take(self, replayed: Any, eager: Any, graph_ms: float, eager_ms: float) -> None:
        """One turn, with inputs of its own. Raises NotAdopted."""
        self.graph_ms.append(graph_ms)
        self.eager_ms.append(eager_ms)
        allowed = min(_ROUNDINGS, max(_LATER_ROUNDINGS, _OF_THE_FIRST * self.first))
        differs = why_different(replayed, eager, allowed)
        if differs is not None:
            raise NotAdopted(
                f"its replay {len(self.graph_ms) + 1}, on changed inputs, differs from an eager run {differs}"
            )

    @property
    def turns(self) -> int:
        return CHECKED_REPLAYS - 1

    def why_slower(self, name: str) -> str | None:
        graph, eager = median(self.graph_ms), median(self.eager_ms)
        if graph <= _SAME * eager:
            return None
        return f"a graph of {name} takes {graph:.3g} ms and eager {eager:.3g} ms: it runs eagerly"


def why_different(ours: Any, theirs: Any, roundings: float = _ROUNDINGS) -> str | None:
    """In words, where our tensors are further from theirs than so many roundings of a norm."""
    for mine, right in _pairs(ours, theirs):
        distance, unit = _of_norm(mine, right), _rounding(right)
        if not distance <= roundings * unit:
            return f"by {distance:.1e} of its norm, and {roundings * unit:.1e} is allowed"
    return None


def _distance(ours: Any, theirs: Any) -> float:
    """Of the pair that is furthest apart, in roundings."""
    return max(_of_norm(mine, right) / _rounding(right) for mine, right in _pairs(ours, theirs))


def _pairs(ours: Any, theirs: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True))


def _of_norm(mine: torch.Tensor, right: torch.Tensor) -> float:
    if torch.equal(mine, right):
        return 0.0
    finite = right.isfinite()
    if not bool(finite.all()) and torch.equal(mine.isfinite(), finite):
        # A decoder that overflows in float16 does so with a graph and without.
        mine, right = (tensor.nan_to_num(0.0, 0.0, 0.0) for tensor in (mine, right))
    exact = right.double()
    return float((mine.double() - exact).norm()) / max(float(exact.norm()), 1e-30)


def _rounding(tensor: torch.Tensor) -> float:
    """Of one operation; TF32, which convolutions of float32 are computed in unless forbidden, keeps 10 bits."""
    eps = torch.finfo(tensor.dtype).eps
    tf32 = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    return max(eps, 2.0**-10) if tensor.is_cuda and tensor.dtype == torch.float32 and tf32 else eps
