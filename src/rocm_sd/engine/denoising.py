"""The denoising loop of a pipeline: its models' forwards from recordings, its scheduler's steps from a table.

The loop stays the pipeline's own, so callbacks, progress bars, interrupts and whatever else it does work as before; it
only finds its calls answered sooner. Each replay is the whole forward of a model. What the pipeline does between two
of them (guidance, one kernel for the scheduler's step) is launched while the GPU is busy with the one before.
"""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet, ref

from rocm_sd.engine.capture import CapturedForward
from rocm_sd.engine.installed import Installed
from rocm_sd.engine.parts import EVERYTHING, Parts
from rocm_sd.engine.schedule import hook, unhook

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

    from rocm_sd.engine.schedule import ScheduleRun

__all__ = ["holds", "install", "recorded_models"]

_CAPTURED: WeakKeyDictionary[nn.Module, CapturedForward] = WeakKeyDictionary()
_PARTS = ("unet", "transformer", "controlnet", "vae")
_KINDS = ("UNet2DConditionModel", "ControlNetModel", "ControlNetUnionModel", "SD3Transformer2DModel",
          "SD3ControlNetModel", "FluxTransformer2DModel", "FluxControlNetModel", "Decoder")  # fmt: skip


def install(target: Any, models: Sequence[nn.Module], parts: Parts = EVERYTHING) -> Installed:
    """`target`: the pipeline, or the bare model; `models`: those of it whose forwards are recorded."""
    follow = _Follow(target)
    captured = [_captured(model, parts) for model in models]
    for forward in captured:
        forward.runs.append(follow.run)
    scheduler = getattr(target, "scheduler", None)
    if scheduler is not None:
        follow.hook(scheduler)

    def notes() -> list[str]:
        return [*(note for forward in captured for note in forward.notes()), *follow.notes()]

    def restore() -> None:
        for forward in captured:
            forward.runs.remove(follow.run)
            if not forward.runs:
                _put_back(forward)
        follow.unhook_all()

    return Installed(notes, restore)


def _captured(model: nn.Module, parts: Parts) -> CapturedForward:
    """Where two pipelines share a model, the recordings of the one that came first serve both."""
    known = _CAPTURED.get(model)
    if known is None:
        known = _CAPTURED[model] = _replace_forward(model, parts)
    return known


def holds(model: nn.Module, x: torch.Tensor) -> bool:
    """Whether the model's calls with such a first input are replayed from memory that is held already."""
    captured = _CAPTURED.get(model)
    return captured is not None and captured.holds(x)


def recorded_models(target: Any) -> list[nn.Module]:
    """Of a pipeline the parts that its loop calls and its VAE's decoder; of a model itself, or its decoder."""
    parts = [getattr(target, name, None) for name in _PARTS] if hasattr(target, "components") else [target]
    # Several ControlNets are one part; a VAE is called once a picture, but for hundreds of launches.
    models = [model for part in parts for model in getattr(part, "nets", [getattr(part, "decoder", part)])]
    return [model for model in models if _is_known(model)]


def _is_known(model: Any) -> bool:
    return type(model).__name__ in _KINDS and type(model).__module__.startswith("diffusers.")


class _Follow:
    """The scheduler that a pipeline has at the moment: users put another one there at any time."""

    def __init__(self, target: Any) -> None:
        self._target = ref(target)
        self._hooked: WeakSet[Any] = WeakSet()

    def hook(self, scheduler: Any) -> Any:
        known = hook(scheduler, user=self)
        if known is not None:
            self._hooked.add(scheduler)
        return known

    def run(self) -> ScheduleRun | None:
        scheduler = getattr(self._target(), "scheduler", None)
        if scheduler is None:
            return None
        known = self.hook(scheduler)
        found: ScheduleRun | None = None if known is None else known.run(scheduler)
        return found

    def notes(self) -> list[str]:
        scheduler = getattr(self._target(), "scheduler", None)
        known = None if scheduler is None else hook(scheduler, user=self)
        if known is None:
            return []
        kind = type(scheduler).__name__
        if known.left_to_stock is not None:
            return [f"{kind}: steps as stock does, because {known.left_to_stock}"]
        return [f"{kind}: {known.planned_steps} steps from a table on the device"] if known.planned_steps else []

    def unhook_all(self) -> None:
        for scheduler in list(self._hooked):
            unhook(scheduler, user=self)


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    captured = _CAPTURED.get(self)
    # A copy of the model has no recordings.
    return type(self).forward(self, *args, **kwargs) if captured is None else captured(*args, **kwargs)


# Pickle finds a bound method by its name: a pickled model comes back with its class's own forward.
_forward.__name__ = "forward"


def _replace_forward(model: nn.Module, parts: Parts) -> CapturedForward:
    # accelerate's offload hooks wrap `forward` and keep what they wrapped in `_old_forward`: go inside the wrapper.
    attribute = "_old_forward" if "_old_forward" in model.__dict__ else "forward"
    inner = getattr(model, attribute)
    # A copy of an optimised model has this forward, and no recordings.
    if getattr(inner, "__func__", None) is _forward:
        delattr(model, attribute)
        inner = MethodType(type(model).forward, model)
    captured = CapturedForward(model, inner, hoists=parts.hoisted, records=parts.recorded)
    captured.was_on_the_instance = attribute in model.__dict__
    setattr(model, attribute, MethodType(_forward, model))
    return captured


def _put_back(captured: CapturedForward) -> None:
    captured.clear()
    for model, forward in list(_CAPTURED.items()):
        if forward is not captured:
            continue
        del _CAPTURED[model]
        for name in ("forward", "_old_forward"):
            if getattr(model.__dict__.get(name), "__func__", None) is _forward:
                if name == "forward" and not captured.was_on_the_instance:
                    delattr(model, name)
                else:
                    setattr(model, name, captured.inner())
