"""The denoising loop of a pipeline: its models' forwards from graphs, its scheduler's steps from a table.

The loop stays the pipeline's own, so callbacks, progress bars, interrupts and whatever else it does work as before; it
only finds its calls answered sooner. Each replay is the whole forward of a model. What the pipeline does between two
of them (guidance, one kernel for the scheduler's step) is launched while the GPU is busy with the one before.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch

from rocm_sd.engine.approximation import shallow_transformer, shallow_unet
from rocm_sd.engine.capture import CapturedCalls, HostCall, Policy, PreparedCall, moves_weights, why_foreign
from rocm_sd.engine.denoisers import FEATURES, denoiser
from rocm_sd.engine.encoders import why_not_captured
from rocm_sd.engine.installed import Installed
from rocm_sd.engine.parts import EVERYTHING, Parts
from rocm_sd.engine.schedule import SchedulerHook, hook, own_on_instance
from rocm_sd.rewrite import forwards

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from rocm_sd.engine.schedule import ScheduleRun

__all__ = ["captured_models", "follow_schedule", "holds", "install"]

_PARTS = ("unet", "transformer", "controlnet", "vae")
_KEY = "graphs"


class _DiffusersPolicy(Policy):
    """`runs`, one for each pipeline that has the model, tell which schedule is being run, or None: within one, weights
    do not change, so that what depends on the prompt alone is computed once.
    """

    def __init__(self, name: str, parts: Parts) -> None:
        super().__init__(name)
        self.captures = parts.captured
        self.runs: list[Callable[[], ScheduleRun | None]] = []
        self._hoists = parts.hoisted
        self._unpack: Callable[[], None] | None = None

    def why_not(self, model: nn.Module, device: torch.device) -> str | None:  # noqa: ARG002 -- the level has decided
        return "its weights are moved around its calls" if moves_weights(model) else why_foreign(model)

    def prepare(self, model: nn.Module, call: HostCall) -> PreparedCall | None:
        prepared = PreparedCall.of(model, call.args, call.kwargs, self._run_of) if self._hoists else None
        self._unpack = self._unpack if prepared is None else prepared.hoist.unpack
        return prepared

    def _run_of(self, timestep: torch.Tensor) -> ScheduleRun | None:
        """The run that the timestep is of, if it is of one."""
        current = [run for run in (ask() for ask in self.runs) if run is not None]
        return next((run for run in current if run.number_of(timestep) is not None), None)

    def cleared(self) -> None:
        """Let each weight have memory of its own again."""
        if self._unpack is not None:
            self._unpack()
            self._unpack = None


class _EncoderPolicy(_DiffusersPolicy):
    """Of a text encoder, which is called outside of the loop: nothing of it is hoisted."""

    def why_not(self, model: nn.Module, device: torch.device) -> str | None:  # noqa: ARG002 -- the level has decided
        return why_not_captured(model)

    def prepare(self, model: nn.Module, call: HostCall) -> PreparedCall | None:  # noqa: ARG002 -- it has one forward
        return None


_CAPTURED: WeakKeyDictionary[nn.Module, tuple[CapturedCalls, _DiffusersPolicy]] = WeakKeyDictionary()


def install(
    target: Any,
    models: Sequence[nn.Module],
    parts: Parts = EVERYTHING,
    encoders: Mapping[nn.Module, str] | None = None,
) -> Installed:
    """`target`: the pipeline, or the bare model; `models`: those of it whose forwards are captured; `encoders`: more of
    them, with their names in sentences.

    Where two pipelines share a model, the graphs of the one that came first serve both.
    """
    follow = _Follow(target)
    policies: dict[nn.Module, _DiffusersPolicy] = {
        **{model: _DiffusersPolicy(type(model).__name__, parts) for model in models},
        **{model: _EncoderPolicy(name, parts) for model, name in (encoders or {}).items()},
    }
    restores = [forwards.share(model, _KEY, partial(_captured, model, policy)) for model, policy in policies.items()]
    captured = [_CAPTURED[model] for model in policies]
    for _, policy in captured:
        policy.runs.append(follow.run)
    follow.hook()

    def notes() -> list[str]:
        return [*(note for calls, _ in captured for note in calls.notes()), *follow.notes()]

    def restore() -> None:
        for (_, policy), put_back in zip(captured, restores, strict=True):
            policy.runs.remove(follow.run)
            put_back()
        follow.unhook_all()

    return Installed(notes, restore, lambda: [calls.graphs() for calls, policy in captured if policy.captures])


def _captured(model: nn.Module, policy: _DiffusersPolicy) -> Callable[[], None]:
    calls, device = CapturedCalls(model, policy), next(model.parameters()).device
    _CAPTURED[model] = calls, policy

    def answer(model: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A copy of the model, or one whose wrapper by somebody else outlived `restore`, has no graphs.
        if not forwards.is_shared(model, _KEY):
            return inner(*args, **kwargs)
        given = _timestep_as_tensor(args, kwargs)
        return calls(HostCall(*given, device, partial(inner, *args, **kwargs), inner, used=_used(kwargs)))

    take_off = forwards.surround(model, answer)

    def restore() -> None:
        calls.clear()
        take_off()

    return restore


def _used(kwargs: dict[str, Any]) -> Callable[[nn.Module], list[nn.Module]] | None:
    """Of a shallow pass, or of a part of one, what it runs."""
    given = kwargs.get(FEATURES)
    return None if given is None or given[1] is None else partial(_used_by, given=given)


def _used_by(model: nn.Module, given: tuple[Any, ...]) -> list[nn.Module]:
    if shallow_transformer.is_known(model):
        return shallow_transformer.used(model, given)
    return shallow_unet.used(model, depth=given[0])


def _timestep_as_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A number would be baked in, and each step be a kind of its own. Stock makes the same tensor of it."""
    if "timestep" in kwargs:
        if isinstance(kwargs["timestep"], (int, float)):
            kwargs = {**kwargs, "timestep": _as_tensor(kwargs["timestep"])}
    elif len(args) > 1 and isinstance(args[1], (int, float)):
        args = (args[0], _as_tensor(args[1]), *args[2:])
    return args, kwargs


def _as_tensor(number: float) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else torch.int64)


def holds(model: nn.Module, x: torch.Tensor) -> bool:
    """Whether the model's calls with such a first input are replayed from memory that is held already."""
    return model in _CAPTURED and _CAPTURED[model][0].holds(x)


def captured_models(target: Any) -> list[nn.Module]:
    """Of a pipeline the parts that its loop calls and its VAE's decoder; of a model itself, or its decoder."""
    parts = [getattr(target, name, None) for name in _PARTS] if hasattr(target, "components") else [target]
    # Several ControlNets are one part.
    models = [model for part in parts for model in getattr(part, "nets", [getattr(part, "decoder", part)])]
    return [model for model in models if denoiser(model) is not None]


def follow_schedule(target: Any) -> tuple[Callable[[], ScheduleRun | None], Callable[[], None]]:
    """Which schedule a pipeline runs, or None, whenever asked; and how to stop following it."""
    follow = _Follow(target)
    follow.hook()
    return follow.run, follow.unhook_all


class _Follow:
    """The scheduler that a pipeline has at the moment: users put another one there at any time."""

    def __init__(self, target: Any) -> None:
        self._target = ref(target)
        self._hooks: WeakKeyDictionary[Any, SchedulerHook | None] = WeakKeyDictionary()

    def hook(self) -> tuple[Any, SchedulerHook | None]:
        scheduler = getattr(self._target(), "scheduler", None)
        if scheduler is None:
            return None, None
        # Asked again where it was left alone: methods of its own may have been taken off.
        known = self._hooks.get(scheduler)
        if known is None:
            known = self._hooks[scheduler] = hook(scheduler)
        return scheduler, known

    def run(self) -> ScheduleRun | None:
        scheduler, known = self.hook()
        return None if known is None else known.run(scheduler)

    def notes(self) -> list[str]:
        scheduler, known = self.hook()
        if scheduler is None:
            return []
        kind, own = type(scheduler).__name__, own_on_instance(scheduler)
        notes = [] if own is None else [f"{kind}: its methods are left alone, because it has {own}"]
        if known is not None and known.why_fallback is not None:
            notes.append(f"{kind}: steps as stock does, because {known.why_fallback}")
        elif known is not None and known.planned_steps:
            notes.append(f"{kind}: {known.planned_steps} steps from a table on the device")
        return notes

    def unhook_all(self) -> None:
        for known in filter(None, self._hooks.values()):
            known.unhook()
