"""The calls of a model that come in new shapes: somebody hears of each before it is answered, and may measure it."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd import arch, settings, transforms, workers
from rocm_sd.engine.calibration.skeleton import described_call
from rocm_sd.engine.installed import Installed
from rocm_sd.engine.memory import is_capturing
from rocm_sd.rewrite import forwards
from rocm_sd.tuning.choice import was_timed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn

    FirstCall = Callable[[nn.Module, str, tuple[Any, ...], dict[str, Any]], bool]

__all__ = ["counts", "install", "searches_ops", "wanted"]

log = logging.getLogger("rocm_sd")
_KEY = "calibration"
# One model is measured at a time, whichever thread calls it.
_busy = threading.Lock()


def counts(device: torch.device) -> bool:
    """Whether plans that were measured here decide: on a GPU, unless switched off; never within a worker."""
    asked = settings.current().calibrate
    return not workers.inside() and (device.type != "cpu" if asked is None else asked)


def wanted(device: torch.device, *, graphs: bool) -> bool:
    """Whether a model without a plan is measured at its first call: not where its architecture was timed before.

    Without graphs it is measured there, too: what launching costs is a matter of the host, which no shipped data know.
    """
    return counts(device) and (not graphs or searches_ops(device))


def searches_ops(device: torch.device) -> bool:
    """Whether ops are searched as well: the data of an architecture that was timed have them."""
    return bool(settings.current().calibrate) or not was_timed(arch.detect(device).name)


@dataclass
class _Seen:
    shapes: set[tuple[Any, ...]] = field(default_factory=set)


def install(models: Iterable[nn.Module], device: torch.device, first_call: FirstCall) -> Installed:
    """`first_call(model, call, args, kwargs)` hears of each call in new shapes, and says whether the model was changed
    by it; then the call is made anew.
    """
    restores = [forwards.share(model, _KEY, lambda model=model: _watch(model, device, first_call)) for model in models]  # type: ignore[misc]

    def restore() -> None:
        for one in restores:
            one()

    return Installed(tuple, restore)


def _watch(model: nn.Module, device: torch.device, first_call: FirstCall) -> Callable[[], None]:
    seen = _Seen()

    def answer(model: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shapes = _shapes(args, kwargs)
        if shapes in seen.shapes or _runs_as_it_is(device) or not forwards.is_shared(model, _KEY):
            return inner(*args, **kwargs)
        if not _busy.acquire(blocking=False):
            return inner(*args, **kwargs)
        try:
            seen.shapes.add(shapes)
            changed = first_call(model, described_call(args, kwargs), args, kwargs)
        finally:
            _busy.release()
        return model.forward(*args, **kwargs) if changed else inner(*args, **kwargs)

    return forwards.surround(model, answer)


def _runs_as_it_is(device: torch.device) -> bool:
    if torch.is_grad_enabled() or torch.is_autocast_enabled(device.type) or transforms.at_hand():
        return True
    return is_capturing(device)


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What tells calls of other sizes apart, at a few microseconds a call."""
    return tuple((value.shape, value.dtype) for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
