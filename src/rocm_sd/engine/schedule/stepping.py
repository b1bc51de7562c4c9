"""A scheduler's `set_timesteps` and `step` on one instance: steps run from a table on the device, without a wait.

Stock's `step` looks its coefficients up by the timestep, for which the host waits for the device in every step. Here a
plan is made at the first step of a run (step_plan.py), and each step is one `guided_step` of what the pipeline hands
over: the sample is the caller's, whatever a callback has made of it. A scheduler that has no plan steps as it always
did, called with the very arguments that the pipeline gave; one with methods that are not Diffusers' has none.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from rocm_sd.engine.schedule.ownership import Methods, own_on_instance
from rocm_sd.engine.schedule.step_plan import StepPlan, require_known, step_table
from rocm_sd.errors import Unsupported
from rocm_sd.ops import guided_step
from rocm_sd.rewrite import forwards

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ScheduleRun", "SchedulerHook", "hook"]

_NAMES = ("set_timesteps", "step")
_HOOKS: WeakKeyDictionary[Any, SchedulerHook] = WeakKeyDictionary()


def hook(scheduler: Any) -> SchedulerHook | None:
    """The scheduler's hook, put on it where it had none; None of what is no scheduler of Diffusers' kind, or has a
    method of its own on the instance: such a one is left alone. Pipelines share schedulers: the hook stays until each
    that asked for it has called its `unhook`.
    """
    if not all(callable(getattr(type(scheduler), name, None)) for name in _NAMES):
        return None
    if not hooked(scheduler) and own_on_instance(scheduler) is not None:
        return None
    unhook = forwards.share(scheduler, _NAMES, functools.partial(_hooked, scheduler))
    known = _HOOKS[scheduler]
    known.unhooks.append(unhook)
    return known


def _hooked(scheduler: Any) -> Callable[[], None]:
    known = _HOOKS[scheduler] = SchedulerHook()
    restores = [forwards.surround(scheduler, functools.partial(known.answer, name), name) for name in _NAMES]
    for name in _NAMES:
        vars(scheduler)[name].__func__.__wrapped__ = _OfTheClass(type(scheduler), name)

    def restore() -> None:
        for one in restores:
            one()

    return restore


@dataclass(frozen=True)
class _OfTheClass:
    """What a stand-in wraps, for `inspect`: pipelines hand over what its signature names; it may be patched."""

    kind: Any
    name: str

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(getattr(self.kind, self.name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.kind, self.name)(*args, **kwargs)


def hooked(scheduler: Any) -> bool:
    """A copy of a scheduler has no hook, and steps as its class does."""
    return forwards.is_shared(scheduler, _NAMES)


@functools.lru_cache(maxsize=64)
def _signature(step: Any) -> inspect.Signature:
    return inspect.signature(step)


class ScheduleRun:
    """From `set_timesteps` to the next one. `timesteps` as the scheduler has them: pipelines loop over views of this
    tensor, and a timestep is known by where it lies, without waiting for the device to tell its value.
    """

    def __init__(self, timesteps: torch.Tensor) -> None:
        self.timesteps = timesteps
        # Read before the run's first launch: later, the host would wait for the GPU.
        self.values: list[float] = timesteps.tolist()
        self._version = None if timesteps.is_inference() else timesteps._version  # noqa: SLF001

    def is_last(self, timestep: object) -> bool:
        return self.number_of(timestep) == len(self.timesteps) - 1

    def number_of(self, timestep: object) -> int | None:
        """Which of the schedule's timesteps this is; None where it is not one of them."""
        ours = self.timesteps
        if not isinstance(timestep, torch.Tensor) or timestep.numel() != 1 or timestep.dtype != ours.dtype:
            return None
        if self._version is None or ours._version != self._version or ours.dim() != 1:  # noqa: SLF001
            return None
        if timestep.device != ours.device or timestep.untyped_storage().data_ptr() != ours.untyped_storage().data_ptr():
            return None
        number, rest = divmod(int(timestep.storage_offset() - ours.storage_offset()), max(ours.stride(0), 1))
        if rest or not 0 <= number < len(ours):
            return None
        # Through numpy it may have been written uncounted; on a GPU, to look would be to wait.
        return None if ours.device.type == "cpu" and float(timestep) != self.values[number] else number


class SchedulerHook:
    """`why_fallback`: why the scheduler steps by itself in this run, if it does."""

    def __init__(self) -> None:
        self.unhooks: list[Callable[[], None]] = []
        self.why_fallback: str | None = None
        self.planned_steps = 0
        self._run: ScheduleRun | None = None
        self._stepper: _Stepper | None = None
        self._steps = 0
        self._over = False

    def unhook(self) -> None:
        self.unhooks.pop()()

    def answer(
        self, name: str, scheduler: Any, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return getattr(self, name)(scheduler, inner, args, kwargs) if hooked(scheduler) else inner(*args, **kwargs)

    def run(self, scheduler: Any) -> ScheduleRun | None:
        """The run that the scheduler is in; None before `set_timesteps` and after the last step."""
        timesteps = getattr(scheduler, "timesteps", None)
        if self._over or not isinstance(timesteps, torch.Tensor):
            return None
        # A pipeline may have given it other timesteps meanwhile.
        if self._run is None or self._run.timesteps is not timesteps:
            self._run = ScheduleRun(timesteps)
        return self._run

    def set_timesteps(
        self, scheduler: Any, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        result = inner(*args, **kwargs)
        self._run, self._stepper, self._steps, self._over = None, None, 0, False
        self.run(scheduler)
        return result

    def step(self, scheduler: Any, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._steps:
            self._stepper = self._planned(scheduler, args, kwargs)
        result = None if self._stepper is None else self._stepper.step(scheduler, args, kwargs)
        planned = result is not None
        if not planned:
            result = inner(*args, **kwargs)
        self._steps += 1
        self.planned_steps += planned
        run = self.run(scheduler)
        # By whatever name, and in whatever place, a step takes its timestep.
        last = run is None or any(run.is_last(value) for value in (*args, *kwargs.values()))
        self._over = run is None or last or self._steps >= len(run.timesteps)
        return result

    def _planned(self, scheduler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Stepper | None:
        self.why_fallback = None
        try:
            methods = Methods(scheduler)
            # Of another class nothing is known, not even what its step takes.
            require_known(scheduler, methods)
            given = _given(scheduler, args, kwargs)
            if given is None:
                return None
            return _Stepper(self._plan(scheduler, given), given["sample"].device, methods)
        except Unsupported as refusal:
            self.why_fallback = str(refusal)
            return None

    def _plan(self, scheduler: Any, given: dict[str, Any]) -> StepPlan:
        reason, run = _unusual(scheduler, given), self.run(scheduler)
        if reason is None and run is None:
            reason = "no timesteps set"
        if reason is None and run is not None:
            number = run.number_of(given["timestep"])
            # A scheduler that counts its steps begins where it says, whatever timestep it is given.
            if hasattr(scheduler, "step_index"):
                return step_table(scheduler, None, given.get("eta", 0.0), run.values)
            if number is None and run.values[0] == _value(given["timestep"]):
                number = 0
            if number is not None:
                return step_table(scheduler, number, given.get("eta", 0.0), run.values)
            reason = "a timestep that is not one of its own"
        raise Unsupported("The step table", f"{type(scheduler).__name__} with {reason}")


def _given(scheduler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of a step of a known class by their names; None where they do not fit, which stock will say."""
    try:
        return _signature(type(scheduler).step).bind(scheduler, *args, **kwargs).arguments
    except TypeError:
        return None


def _unusual(scheduler: Any, given: dict[str, Any]) -> str | None:
    """What of a call of `step` no plan has, in words."""
    output, sample = given["model_output"], given["sample"]
    if type(output) is not torch.Tensor or type(sample) is not torch.Tensor:
        return "something else than tensors"
    if output.dtype != sample.dtype or output.shape != sample.shape or output.device != sample.device:
        return "a prediction of another kind than the sample"
    if torch.is_grad_enabled() and (output.requires_grad or sample.requires_grad):
        return "gradients"
    if given.get("return_dict", True):
        return "its answer as an object"
    for name, parameter in _signature(type(scheduler).step).parameters.items():
        if name in {"self", "model_output", "timestep", "sample", "eta", "generator", "return_dict"}:
            continue
        if name in given and given[name] is not parameter.default and given[name] != parameter.default:
            return f"{name} given to its step"
    return None


def _value(timestep: Any) -> float:
    return float(timestep) if not isinstance(timestep, torch.Tensor) or timestep.numel() == 1 else float("nan")


class _Stepper:
    """One run of a plan."""

    def __init__(self, plan: StepPlan, device: torch.device, methods: Methods) -> None:
        self.plan = plan
        self._methods = methods
        self._table = plan.table.coefficients.to(device, non_blocking=True)
        self._numbers = torch.arange(plan.calls, device=device)
        self._times = plan.timesteps.tolist() if plan.timesteps.device.type == "cpu" else None
        self._states: torch.Tensor | None = None
        self._calls = 0

    def step(self, scheduler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...] | None:
        """What stock's step returns; None where stock can and must take over."""
        call, plan = self._calls, self.plan
        given = _given(scheduler, args, kwargs) if self._methods.stand(scheduler) else {}
        if given is None:
            return None
        reason = self._why_not(scheduler, given)
        if reason is not None:
            if plan.table.states > 1 and call:
                hint = "Call set_timesteps before a run, or switch step graphs off with ROCM_SD_STEP_GRAPH=0."
                raise Unsupported(f"{type(scheduler).__name__} in the middle of a run", reason, hint=hint)
            return None
        output, sample = given["model_output"], given["sample"]
        noise = plan.noise(call, output.shape, output.dtype, output.device, given.get("generator"))
        states = self._states_with(sample)
        new, _ = guided_step(output, states, self._table, self._numbers[call : call + 1], None, noise)
        self._states = new if plan.table.states > 1 else None
        self._calls += 1
        plan.advance(scheduler, self._calls)
        previous = new[0].to(sample.dtype)
        if plan.table.pictures is None:
            return (previous,)
        of_output, of_sample = plan.table.pictures[call]
        known = sample.float() if plan.wide_pictures and sample.dtype.itemsize < 4 else sample
        return previous, torch.add(known * of_sample, output, alpha=of_output)

    def _why_not(self, scheduler: Any, given: dict[str, Any]) -> str | None:
        if not given:
            return "methods that were changed meanwhile"
        reason = _unusual(scheduler, given)
        if self._calls >= self.plan.calls:
            return reason or f"more than {self.plan.calls} steps"
        if self.plan.start is None and not self._expects(given["timestep"]):
            return reason or "timesteps out of their order"
        return reason

    def _expects(self, timestep: Any) -> bool:
        if self._times is not None:
            return bool(_value(timestep) == self._times[self._calls])
        expected = self.plan.timesteps[self._calls]
        if isinstance(timestep, torch.Tensor) and timestep.data_ptr() == expected.data_ptr():
            return True
        # Both may be on the GPU: this waits for it.
        return _value(timestep) == float(expected)

    def _states_with(self, sample: torch.Tensor) -> torch.Tensor:
        """The sample as the caller has it now, and what the scheduler remembers, in float32 where there is any."""
        count = self.plan.table.states
        if count == 1:
            return sample[None]
        wide = torch.promote_types(sample.dtype, torch.float32)
        if self._states is None:
            self._states = torch.zeros((count, *sample.shape), dtype=wide, device=sample.device)
        self._states[0].copy_(sample)
        return self._states
