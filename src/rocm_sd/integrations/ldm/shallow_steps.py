"""Which calls of a host's UNet are shallow, and what they take from earlier ones.

A host says which step of which picture a call is, and whose: features are kept by that, and never given to another.
What cannot be told is answered as if there were no approximation, and the reason is counted.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from rocm_sd.engine import is_out_of_memory
from rocm_sd.engine.capture import why_different
from rocm_sd.integrations.ldm.shallow_pass import why_no_pass

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from rocm_sd.engine import Skipping
    from rocm_sd.integrations.ldm.quality import HostSetting

__all__ = ["HostPasses", "ShallowSteps", "Told", "here"]

# A sampler of second order calls a second time at a step, or at the next one before its turn. With two whole steps that
# has been seen before the first shallow one.
_WHOLE_FIRST = 2


@dataclass(frozen=True)
class Told:
    """Step `number` of `count`. `run`: what there is one of for each time that a sampler works; `whose`: which call of
    the step it is, and `form`: in which shapes. `text`: of the prompts, where `whose` does not tell that they have
    changed. `fewer`: so many of the steps may not come. `parts`: calls for some of its rows alone that a later step may
    make, by their kinds.
    """

    run: Any
    number: int
    count: int
    whose: Hashable
    form: Hashable
    text: torch.Tensor | None = None
    fewer: int = 0
    parts: tuple[tuple[Hashable, slice], ...] = ()

    @property
    def kind(self) -> Hashable:
        return self.whose, self.form


@dataclass(frozen=True)
class HostPasses:
    """The ways to answer one call. `exact`: as without approximations. `stock`: the host's own, with no graph.
    `branch(depth, features)`: a whole or a shallow pass; `plain_branch`: the same with no graph.
    `why_not`: what in the model is not known to be the host's own, in words.
    """

    exact: Callable[[], Any]
    stock: Callable[[], Any]
    branch: Callable[[int, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
    plain_branch: Callable[[int, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
    why_not: Callable[[], str | None]


@dataclass
class _Kept:
    """Of one kind of call: since step `first`, the last one at `last`. `features`: of the last whole step, and of the
    one before, with their step numbers.
    """

    first: int
    last: int
    text: torch.Tensor | None = None
    features: list[tuple[int, torch.Tensor]] = field(default_factory=list)


class ShallowSteps:
    """Of one UNet. `propagates`: whether an error is the host's own, and must reach it."""

    def __init__(self, settings: Sequence[HostSetting], propagates: Callable[[Exception], bool]) -> None:
        self._settings = list(settings)
        self._propagates = propagates
        self._run: ref[Any] | None = None
        self._unclear: str | None = None
        self._kept: dict[Hashable, _Kept] = {}
        self._tested: set[Hashable] = set()
        self._busy = threading.Lock()
        self.broken: str | None = None
        self.last: HostSetting | None = None
        self.counts: Counter[str] = Counter()
        self.exact_because: Counter[str] = Counter()

    def clear(self) -> None:
        """A picture begins or ends."""
        self._run, self._unclear = None, None
        self._kept.clear()

    def answer(self, unet: Any, told: Told | None, why_exact: str | None, passes: HostPasses) -> Any:
        """`why_exact`: why this call has no approximation, whatever step it is."""
        if torch.compiler.is_compiling() or not self._busy.acquire(blocking=False):
            return passes.exact()
        try:
            depth, features, reason = self._planned(unet, told, why_exact, passes)
            if reason is None and told is not None:
                try:
                    return self._branch(told, depth, features, passes)
                except Exception as error:
                    self._kept.pop(told.kind, None)
                    if self._propagates(error) and not is_out_of_memory(error):
                        raise
                    reason = self._failed(error)
        finally:
            self._busy.release()
        # Not while an error is at hand: its frames hold the memory that may have run out.
        self.exact_because[reason or "its step is not known"] += 1
        return passes.exact()

    def _planned(
        self, unet: Any, told: Told | None, why_exact: str | None, passes: HostPasses
    ) -> tuple[int, torch.Tensor | None, str | None]:
        """The depth, what a shallow call takes or None for a whole one, and why it is exact."""
        if self.broken is not None or torch.is_grad_enabled():
            return 0, None, self.broken or "gradients are wanted"
        if told is None:
            # Between two steps of the picture: what was kept of these stays.
            return 0, None, why_exact or "its step is not known"
        reason = why_exact or self._why_exact(told)
        if reason is not None:
            self._kept.pop(told.kind, None)
            return 0, None, reason
        assert self.last is not None
        skipping = here(self.last.skipping)
        kept = self._kept_of(told, skipping)
        kept.last = told.number
        whole = skipping.step(told.number, kept.first, told.count - told.fewer).whole
        near = bool(kept.features) and told.number - kept.features[-1][0] < skipping.every
        # A part of a call that was whole has features before any pass of its own was tried.
        if not whole and near and (told.form, skipping.depth) in self._tested:
            return skipping.depth, _carried(kept, told.number), None
        reason = why_no_pass(unet, skipping.depth) or passes.why_not()
        if reason is not None:
            self._kept.pop(told.kind, None)
        return skipping.depth, None, reason

    def _why_exact(self, told: Told) -> str | None:
        if self._run is None or self._run() is not told.run:
            self.clear()
            self._run = ref(told.run)
        self.last = self.of_steps(told.count)
        if self.last is None:
            return f"nothing was measured for {told.count} steps"
        if not self.last.caches:
            return f"the setting for {told.count} steps leaves out no layers"
        kept = self._kept.get(told.kind)
        if kept is not None and kept.last == told.number:
            # Parts of a picture, one after the other, or a sampler of second order.
            self._unclear = "it is called more than once at one step"
        return self._unclear

    def of_steps(self, count: int) -> HostSetting | None:
        fitting = [setting for setting in self._settings if setting.from_steps <= count]
        return fitting[-1] if fitting else None

    def _kept_of(self, told: Told, skipping: Skipping) -> _Kept:
        kept = self._kept.get(told.kind)
        if kept is None or told.number < kept.last or _changed(kept.text, told.text):
            # Those that no step can use any more: prompts and sizes come and go within a picture.
            old = [kind for kind, one in self._kept.items() if abs(told.number - one.last) > skipping.every]
            for kind in old:
                del self._kept[kind]
            kept = self._kept[told.kind] = _Kept(told.number, told.number, told.text)
        return kept

    def _branch(self, told: Told, depth: int, features: torch.Tensor | None, passes: HostPasses) -> torch.Tensor:
        answered: torch.Tensor
        if features is not None:
            answered, _ = passes.branch(depth, features)
            self.counts["shallow"] += 1
            return answered
        if (told.form, depth) in self._tested:
            answered, made = passes.branch(depth, None)
        else:
            answered, made = self._first_whole(told, depth, passes)
        self.counts["whole"] += 1
        kept = self._kept[told.kind]
        assert self.last is not None
        near = bool(kept.features) and told.number - kept.features[-1][0] <= self.last.skipping.every
        earlier = kept.features[-1:] if self.last.skipping.order and near else []
        kept.features = [*earlier, (told.number, made)]
        for kind, rows in told.parts:
            mine = [(number, each[rows]) for number, each in kept.features]
            self._kept[kind] = _Kept(kept.first, kept.last, None, mine)
        return answered

    def _first_whole(self, told: Told, depth: int, passes: HostPasses) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each form of call: both passes are held against the host's own forward, the shallow one with the features
        of this very call, where it has to give the same.
        """
        theirs = passes.stock()
        whole, features = passes.plain_branch(depth, None)
        shallow, _ = passes.plain_branch(depth, features)
        for name, ours in (("whole", whole), ("shallow", shallow)):
            differs = why_different(ours, theirs)
            if differs is not None:
                raise _Wrong(f"its {name} pass differs from the host's own {differs}")
        self._tested.add((told.form, depth))
        return theirs, features

    def _failed(self, error: Exception) -> str:
        if is_out_of_memory(error):
            self.clear()
            return "there was too little memory to keep features"
        first_line = (str(error).splitlines() or [""])[0]
        self.broken = first_line if isinstance(error, _Wrong) else f"it failed ({type(error).__name__}: {first_line})"
        self.clear()
        return self.broken

    def notes(self) -> list[str]:
        return list(self._notes())

    def _notes(self) -> Iterator[str]:
        # Of the pictures so far; before the first one, of each number of steps.
        for setting in self._settings if self.last is None else [self.last]:
            since = f" from {setting.from_steps} steps on" if self.last is None and setting.from_steps > 1 else ""
            if not setting.skipping.is_exact:
                yield f"the UNet is approximated{since}: {setting.skipping} ({setting.why})"
                if setting.caches and setting.skipping.whole_first < _WHOLE_FIRST:
                    yield "the UNet: the first two steps of a picture compute all layers"
                yield from (f"the UNet: {note}" for note in setting.notes)
        if self.counts:
            yield f"the UNet: calls so far: {', '.join(f'{count} {name}' for name, count in self.counts.items())}"
        for reason, calls in self.exact_because.items():
            yield f"the UNet: {calls} calls are exact, because {reason}"


class _Wrong(Exception):
    """A pass does not give what the host's own forward does, in words."""


def _changed(before: torch.Tensor | None, now: torch.Tensor | None) -> bool:
    return before is not None and now is not None and not torch.equal(before, now)


def here(skipping: Skipping) -> Skipping:
    """As it is done in hosts: the steps that compute guidance stay the whole ones."""
    more = max(_WHOLE_FIRST - skipping.whole_first, 0)
    guided_first = skipping.guided_first + (more if skipping.guided_every > 1 else 0)
    return replace(skipping, whole_first=skipping.whole_first + more, guided_first=guided_first)


def _carried(kept: _Kept, number: int) -> torch.Tensor:
    """The features as they were at the last whole step, or further along the line through the last two."""
    at, last = kept.features[-1]
    if len(kept.features) < 2:
        return last
    before, earlier = kept.features[-2]
    return torch.lerp(earlier, last, (number - before) / (at - before))
