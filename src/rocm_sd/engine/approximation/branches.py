"""A UNet's or a transformer's calls: which step of a picture it is, and the branch that answers it.

A call is whole or shallow, of both halves of a guided batch or of the one with the prompt. Each is a kind of call by
itself, and so gets a graph of its own: what a shallow one reads is an input of it. Where the first blocks of a
transformer tell which it is, they are one graph, and what follows in either case another. What cannot be told (no step
of a known run, gradients, another thread's picture) is answered as if there were no approximation.
"""

from __future__ import annotations

import threading
from collections import Counter
from functools import lru_cache
from inspect import Signature, signature
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.utils import _pytree as pytree

from rocm_sd.engine.approximation import shallow_transformer, shallow_unet
from rocm_sd.engine.approximation.kept import Kept, Pictures
from rocm_sd.engine.approximation.shipped import of_steps
from rocm_sd.engine.approximation.steps import number_of
from rocm_sd.engine.denoisers import FEATURES, Denoiser, denoiser
from rocm_sd.rewrite import forwards

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from rocm_sd.engine.approximation.shipped import Setting
    from rocm_sd.engine.approximation.skipping import Skipping, Step
    from rocm_sd.engine.schedule import ScheduleRun

    Inner = Callable[..., Any]

__all__ = ["Branches", "answer_branch", "can_be_approximated"]


def can_be_approximated(model: Any) -> bool:
    known = denoiser(model)
    return known is not None and (known.is_unet or shallow_transformer.is_known(model))


class Branches:
    """`settings`: what is left out, by the number of steps. `run_of` says which schedule is being run, and
    `scheduler_of` whose; `is_guided`, whether the first half of a batch has no prompt.
    """

    def __init__(
        self,
        settings: list[Setting],
        run_of: Callable[[], ScheduleRun | None],
        scheduler_of: Callable[[], Any],
        is_guided: Callable[[], bool],
    ) -> None:
        self.last: Setting | None = None
        self._settings = settings
        self.counts: Counter[str] = Counter()
        self.whole_because: Counter[str] = Counter()
        self._run_of = run_of
        self._scheduler_of = scheduler_of
        self._is_guided = is_guided
        self._pictures = Pictures()
        self._inside: tuple[ref[ScheduleRun], str | None] | None = None
        self._busy = threading.Lock()

    def clear(self) -> None:
        self._pictures.clear()

    def answer(self, model: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_grad_enabled():
            self.whole_because["gradients may be wanted"] += 1
            return inner(*args, **kwargs)
        if not self._busy.acquire(blocking=False):
            self.whole_because["another thread was in a call of it"] += 1
            return inner(*args, **kwargs)
        try:
            named = by_name(model, args, kwargs)
            run, number = self._where(named)
            reason = self._why_exact(model, named, run, number)
            if reason is not None or run is None or number is None:
                self.whole_because[str(reason)] += 1
                self._pictures.forget(named.get("encoder_hidden_states"))
                return inner(*args, **kwargs)
            return (self._step(model, inner, named, run, number),)
        finally:
            self._busy.release()

    def _where(self, named: dict[str, Any]) -> tuple[ScheduleRun | None, int | None]:
        run = self._run_of()
        if run is None or not named:
            return run, None
        return run, number_of(run, self._scheduler_of(), named["timestep"])

    def _why_exact(self, model: Any, named: dict[str, Any], run: ScheduleRun | None, number: int | None) -> str | None:
        if not named or named["return_dict"] or not isinstance(named[_sample(model)], torch.Tensor):
            return "it is called in another form than pipelines call it"
        if run is None or number is None:
            return "the step is not one of a schedule that is known"
        self.last = of_steps(self._settings, len(run.timesteps))
        if self.last.skipping.is_exact:
            return self.last.why
        if not isinstance(named["encoder_hidden_states"], torch.Tensor):
            return "it is given no encoder_hidden_states"
        if forwards.is_foreign(model, forwards.innermost(model)):
            return "its forward is not its class's own"
        return _why_not(model, self.last.skipping, named) or self._why_not_inside(model, run)

    def _why_not_inside(self, model: Any, run: ScheduleRun) -> str | None:
        """Found once a run: graphs look at what they have baked in before each replay by themselves."""
        if not shallow_transformer.is_known(model):
            return None
        if self._inside is None or self._inside[0]() is not run:
            self._inside = ref(run), shallow_transformer.why_not_inside(model)
        return self._inside[1]

    def _step(self, model: Any, inner: Inner, named: dict[str, Any], run: ScheduleRun, number: int) -> torch.Tensor:
        known = denoiser(model)
        assert known is not None
        assert self.last is not None
        sample, text = named[_sample(model)], named["encoder_hidden_states"]
        controlled = () if known.is_unet else shallow_transformer.controlled(model, named)
        form = (tuple(sample.shape), sample.dtype, sample.device, tuple(text.shape), controlled)
        kept = self._pictures.of(run, number, text, form, self.last.skipping)
        skipping, batch = kept.skipping, len(sample)
        step = skipping.step(number, kept.first, len(run.timesteps))
        kept.last = number
        halves = batch % 2 == 0 and self._is_guided() and skipping.skips_guidance
        if not halves or step.guided or (step.difference and kept.difference is None):
            result = self._branch(model, inner, named, kept, step, slice(None))
            self.counts["guided" if halves else "calls"] += 1
            if halves and skipping.guided_every > 1:
                kept.difference = result[batch // 2 :] - result[: batch // 2]
            return result
        rows = slice(batch // 2, None)
        part = {name: _part(known, name, value, rows) for name, value in named.items()}
        result = self._branch(model, inner, part, kept, step, rows)
        self.counts["guidance reused" if step.difference else "no guidance"] += 1
        without = result - kept.difference if step.difference and kept.difference is not None else result
        return torch.cat([without, result])

    def _branch(
        self, model: Any, inner: Inner, named: dict[str, Any], kept: Kept, step: Step, rows: slice
    ) -> torch.Tensor:
        answered: torch.Tensor
        number, skipping = kept.last, kept.skipping
        if not skipping.caches:
            self.counts["whole"] += 1
            answered = inner(**named)[0]
            return answered
        may_be_shallow = bool(kept.features) and not step.whole
        if skipping.first_block:
            return self._by_first_block(model, inner, named, kept, rows, may_be_shallow=may_be_shallow)
        depth = skipping.depth
        if not may_be_shallow:
            self.counts["whole"] += 1
            answered, features = inner(**named, **{FEATURES: (depth, None)})
            kept.keep(number, features, rows)
            return answered
        self.counts["shallow"] += 1
        answered, _ = inner(**named, **{FEATURES: (depth, kept.carried(number)[rows])})
        return answered

    def _by_first_block(
        self, model: Any, inner: Inner, named: dict[str, Any], kept: Kept, rows: slice, *, may_be_shallow: bool
    ) -> torch.Tensor:
        """The first blocks, and by what they add the others or what these had added; nothing is computed twice."""
        answered: torch.Tensor
        number, depth = kept.last, kept.skipping.head
        state, added = inner(**named, **{FEATURES: ("head", depth)})
        after = shallow_transformer.after_head(model, named)
        if may_be_shallow and kept.added is not None:
            may_be_shallow = shallow_transformer.changed_by(added, kept.added[rows]) < kept.skipping.first_block
        if may_be_shallow:
            self.counts["shallow"] += 1
            (answered,) = inner(**after, **{FEATURES: ("tail", state, kept.carried(number)[rows])})
            return answered
        self.counts["whole"] += 1
        answered, features = inner(**after, **{FEATURES: ("rest", depth, state)})
        kept.keep(number, features, rows, added)
        return answered


def _sample(model: Any) -> str:
    """The name of what is denoised among the arguments."""
    known = denoiser(model)
    assert known is not None
    return known.each[0]


def _why_not(model: Any, skipping: Skipping, named: dict[str, Any]) -> str | None:
    if shallow_transformer.is_known(model):
        why_not = shallow_transformer.why_not(model, skipping.head if skipping.caches else 0)
        return why_not or shallow_transformer.why_not_call(model, named)
    if skipping.first_block:
        return "first_block is for transformers, and a UNet takes depth and every"
    if skipping.caches:
        return shallow_unet.why_not(model, skipping.depth) or shallow_unet.why_not_call(named)
    return None


def answer_branch(model: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The model's own forward, or a pass that gives or takes features, or a part of one."""
    if FEATURES not in kwargs:
        return inner(*args, **kwargs)
    given = kwargs.pop(FEATURES)
    named = by_name(model, args, kwargs)
    if isinstance(given[0], str):
        part: Any = shallow_transformer.PARTS[given[0]]
        return part(model, *given[1:], named)
    depth, features = given
    run = shallow_transformer.run if shallow_transformer.is_known(model) else shallow_unet.run
    return run(model, depth, features, named)


@lru_cache(maxsize=64)
def _signature(kind: Any) -> Signature:
    return signature(kind.forward)


def by_name(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Empty where they do not fit, which the model itself will say."""
    kind: Any = type(model)
    try:
        bound = _signature(kind).bind(model, *args, **kwargs)
    except TypeError:
        return {}
    bound.apply_defaults()
    named = dict(bound.arguments)
    named.pop("self")
    return named


def _part(known: Denoiser, name: str, value: Any, rows: slice) -> Any:
    def part(leaf: Any) -> Any:
        each = name in known.each or (name in known.one_or_each and isinstance(leaf, torch.Tensor) and leaf.numel() > 1)
        return leaf[rows] if isinstance(leaf, torch.Tensor) and each else leaf

    return pytree.tree_map(part, value)
