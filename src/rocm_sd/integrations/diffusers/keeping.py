"""A pipeline's wish to be optimised: carried out where the pipeline will run, and again where it has been moved to.

`optimize` decides by the device, the offloading and the parts that it finds. Users load a pipeline on the CPU, move it,
switch offloading on or put another UNet in, and expect it to be as fast afterwards.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import ref

import torch
from torch import nn

from rocm_sd.engine import LEVELS, Report, optimize, report, require_quality, restore
from rocm_sd.errors import Unsupported, require_one_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


__all__ = ["Keeper", "in_force"]

Options: TypeAlias = "tuple[str, Any]"


def in_force(pipe: Any) -> Report | None:
    """The report of a pipeline that is optimised now; None of one that is not."""
    try:
        return report(pipe)
    except Unsupported:
        return None


class Keeper:
    """What is wished for one pipeline, and where that was last done.

    The truth is the engine's: `rocm_sd.optimize(pipe, ...)` with other options counts, and a pipeline stays stock after
    `rocm_sd.restore(pipe)`.
    """

    def __init__(self, level: str = "auto", quality: str = "exact") -> None:
        # Said before a model is loaded.
        require_one_of("level", level, LEVELS)
        require_quality(quality)
        self._wish: Options | None = (level, quality)
        self._done_at: Any = None
        self._busy = False

    def settle(self, pipe: Any, *, now: bool = True) -> None:
        """Optimise the pipeline where it lies, unless that is done.

        Without `now`, one that lies on the CPU of a machine with a GPU is left to be moved first: laying its weights
        out twice takes seconds.
        """
        if self._busy:
            return
        place = _place_of(pipe)
        if self._wish is None and place == self._done_at:
            return
        found = in_force(pipe)
        if found is not None and self._wish is None:
            self._wish = (found.level, found.quality)
            with self.undisturbed():
                restore(pipe)
        elif found is not None or self._wish is None:
            # Optimised by the user himself, or restored.
            self._wish, self._done_at = None, place
            return
        if not now and torch.cuda.is_available() and _lies_on_the_cpu(pipe):
            return
        level, quality = self._wish
        with self.undisturbed():
            optimize(pipe, level, quality)
        self._wish, self._done_at = None, _place_of(pipe)

    def moved(self, pipe: Any, move: Callable[[], Any]) -> Any:
        """What `move` gives, with the pipeline optimised where it lies afterwards."""
        found = None if self._busy else in_force(pipe)
        if found is not None and getattr(pipe, "_all_hooks", None):
            # Put back later, an offload of ours would bring the parts to where they were before the move.
            self._wish = (found.level, found.quality)
            with self.undisturbed():
                restore(pipe)
        result = move()
        self.settle(pipe, now=False)
        return result

    def report(self, pipe: Any, *, verbose: bool = False) -> Report:
        self.settle(pipe)
        return report(pipe, verbose=verbose)

    def restore(self, pipe: Any) -> None:
        self._wish = None
        with self.undisturbed():
            restore(pipe)
        self._done_at = _place_of(pipe)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Within, the pipeline moves its parts for reasons of its own."""
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before


def _place_of(pipe: Any) -> tuple[Any, ...]:
    """Which parts a pipeline has, where they lie, and what moves them. Asked before each picture: it must be cheap."""
    parts = [(name, part) for name, part in pipe.components.items() if isinstance(part, nn.Module)]
    return tuple((name, ref(part), *_position(part)) for name, part in parts)


def _position(part: nn.Module) -> tuple[Any, ...]:
    hook = part.__dict__.get("_hf_hook")
    registry = part.__dict__.get("_diffusers_hook")
    hooks = [type(one).__name__ for one in (() if hook is None else getattr(hook, "hooks", (hook,)))]
    hooks += [] if registry is None else list(registry.hooks)
    first = next(part.parameters(), None)
    # What is offloaded lies now here, now there.
    lies = None if first is None or hooks else first.device
    return tuple(hooks), lies, None if first is None else first.dtype


def _lies_on_the_cpu(pipe: Any) -> bool:
    positions = [place[2:] for place in _place_of(pipe)]
    return not any(hooks for hooks, _, _ in positions) and all(
        lies is None or lies.type == "cpu" for _, lies, _ in positions
    )
