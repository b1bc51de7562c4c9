"""One UNet's calls: which step of a picture it is, and the branch that answers it.

A call is whole or shallow, of both halves of a guided batch or of the one with the prompt. Each is a kind of call by
itself, and so gets a graph of its own: what a shallow one reads is an input of it. What cannot be told (no step of a
known run, gradients, another thread's picture) is answered as if there were no approximation.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from inspect import Signature, signature
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.utils import _pytree as pytree

from rocm_sd.engine.approximation import shallow_unet
from rocm_sd.engine.approximation.shipped import of_steps
from rocm_sd.engine.denoisers import FEATURES, Denoiser, denoiser

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from rocm_sd.engine.approximation.shipped import Setting
    from rocm_sd.engine.approximation.skipping import Skipping, Step
    from rocm_sd.engine.schedule import ScheduleRun

    Inner = Callable[..., Any]

__all__ = ["Branches", "answer_branch"]


@dataclass
class _Kept:
    """Of one picture, or one batch of them. `features`: of the last whole step and of the one before, with their step
    numbers; `difference`: the half with the prompt less the other half.
    """

    run: ref[ScheduleRun]
    skipping: Skipping
    first: int
    last: int
    form: tuple[Any, ...]
    features: list[tuple[int, torch.Tensor]]
    difference: torch.Tensor | None = None


class Branches:
    """`settings`: what is left out, by the number of steps. `run_of` says which schedule is being run; `is_guided`,
    whether the first half of a batch has no prompt.
    """

    def __init__(
        self, settings: list[Setting], run_of: Callable[[], ScheduleRun | None], is_guided: Callable[[], bool]
    ) -> None:
        self.last: Setting | None = None
        self._settings = settings
        self.counts: Counter[str] = Counter()
        self.whole_because: Counter[str] = Counter()
        self._run_of = run_of
        self._is_guided = is_guided
        self._kept: _Kept | None = None
        self._busy = threading.Lock()

    def clear(self) -> None:
        self._kept = None

    def answer(self, unet: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_grad_enabled() or not self._busy.acquire(blocking=False):
            return inner(*args, **kwargs)
        try:
            named = by_name(unet, args, kwargs)
            reason = self._why_exact(unet, named)
            if reason is not None:
                self.whole_because[reason] += 1
                self._kept = None
                return inner(*args, **kwargs)
            return (self._step(unet, inner, named),)
        finally:
            self._busy.release()

    def _why_exact(self, unet: nn.Module, named: dict[str, Any]) -> str | None:
        if not named or named["return_dict"] or not isinstance(named["sample"], torch.Tensor):
            return "it is called in another form than pipelines call it"
        run = self._run_of()
        if run is None or run.number_of(named["timestep"]) is None:
            return "the step is not one of a schedule that is known"
        self.last = of_steps(self._settings, len(run.timesteps))
        if self.last.skipping.is_exact:
            return self.last.why
        if self.last.skipping.caches:
            return shallow_unet.why_not(unet, self.last.skipping.depth) or shallow_unet.why_not_call(named)
        return None

    def _step(self, unet: Any, inner: Inner, named: dict[str, Any]) -> torch.Tensor:
        run = self._run_of()
        number = None if run is None else run.number_of(named["timestep"])
        assert run is not None
        assert number is not None
        kept = self._of_this_picture(run, number, named)
        skipping = kept.skipping
        step = skipping.step(number, kept.first, len(run.timesteps))
        kept.last = number
        known, batch = denoiser(unet), named["sample"].shape[0]
        halves = known is not None and batch % 2 == 0 and self._is_guided() and skipping.skips_guidance
        if not halves or step.guided or (step.difference and kept.difference is None):
            result = self._branch(inner, named, kept, step, number, slice(None))
            self.counts["guided" if halves else "calls"] += 1
            if halves and skipping.guided_every > 1:
                kept.difference = result[batch // 2 :] - result[: batch // 2]
            return result
        rows = slice(batch // 2, None)
        part = {name: _part(known, name, value, rows) for name, value in named.items()}
        result = self._branch(inner, part, kept, step, number, rows)
        self.counts["guidance reused" if step.difference else "no guidance"] += 1
        without = result - kept.difference if step.difference and kept.difference is not None else result
        return torch.cat([without, result])

    def _of_this_picture(self, run: ScheduleRun, number: int, named: dict[str, Any]) -> _Kept:
        """What is kept of the steps before; of the first step, nothing."""
        sample, text = named["sample"], named["encoder_hidden_states"]
        form = (tuple(sample.shape), sample.dtype, sample.device, tuple(text.shape))
        kept = self._kept
        if kept is None or kept.run() is not run or kept.form != form or number <= kept.last:
            assert self.last is not None
            kept = self._kept = _Kept(ref(run), self.last.skipping, number, number - 1, form, [])
        return kept

    def _branch(
        self, inner: Inner, named: dict[str, Any], kept: _Kept, step: Step, number: int, rows: slice
    ) -> torch.Tensor:
        answered: torch.Tensor
        if not kept.skipping.caches:
            self.counts["whole"] += 1
            answered = inner(**named)[0]
            return answered
        depth = kept.skipping.depth
        if step.whole or not kept.features:
            self.counts["whole"] += 1
            answered, features = inner(**named, **{FEATURES: (depth, None)})
            _keep(kept, number, features, rows)
            return answered
        self.counts["shallow"] += 1
        answered, _ = inner(**named, **{FEATURES: (depth, _carried(kept, number)[rows])})
        return answered


def _keep(kept: _Kept, number: int, features: torch.Tensor, rows: slice) -> None:
    if rows.start is not None and kept.features:
        # Of the half that was not computed, what there was before.
        features = torch.cat([kept.features[-1][1][: rows.start], features])
    earlier = kept.features[-1:] if kept.skipping.order else []
    kept.features = [*earlier, (number, features)]


def _carried(kept: _Kept, number: int) -> torch.Tensor:
    """The features as they were at the last whole step, or further along the line through the last two."""
    at, last = kept.features[-1]
    if len(kept.features) < 2:
        return last
    before, earlier = kept.features[-2]
    return torch.lerp(earlier, last, (number - before) / (at - before))


def answer_branch(unet: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The UNet's own forward, or a pass that gives or takes features."""
    if FEATURES not in kwargs:
        return inner(*args, **kwargs)
    depth, features = kwargs.pop(FEATURES)
    return shallow_unet.run(unet, depth, features, by_name(unet, args, kwargs))


@lru_cache(maxsize=64)
def _signature(kind: Any) -> Signature:
    return signature(kind.forward)


def by_name(unet: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Empty where they do not fit, which the UNet itself will say."""
    kind: Any = type(unet)
    try:
        bound = _signature(kind).bind(unet, *args, **kwargs)
    except TypeError:
        return {}
    bound.apply_defaults()
    named = dict(bound.arguments)
    named.pop("self")
    return named


def _part(known: Denoiser | None, name: str, value: Any, rows: slice) -> Any:
    assert known is not None

    def part(leaf: Any) -> Any:
        each = name in known.each or (name in known.one_or_each and isinstance(leaf, torch.Tensor) and leaf.numel() > 1)
        return leaf[rows] if isinstance(leaf, torch.Tensor) and each else leaf

    return pytree.tree_map(part, value)
