"""From a Diffusers scheduler, as it stands before a run, to the table that guided_step runs in its place.

A scheduler is taken only if its every option is listed here with a value whose step is known to be linear. What is not
listed (another class, a subclass, an option that a later Diffusers adds, a value such as clip_sample=True) is refused
with the option's name, and the engine then calls the scheduler itself, around a captured UNet. Options that decide the
noise levels alone, such as spacing, Karras sigmas or a zero terminal SNR, are taken with any value: the levels are read
from the scheduler, not computed again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from rocm_sd.engine.schedule.ownership import Methods
from rocm_sd.errors import Unsupported
from rocm_sd.ops.guided_step import tables

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rocm_sd.ops.guided_step.tables import StepTable

__all__ = ["StepPlan", "require_known", "step_table"]

Generators: TypeAlias = "torch.Generator | list[torch.Generator] | None"


@dataclass(frozen=True)
class StepPlan:
    """One run of the denoising loop: call k is the model at timesteps[k], then row k of the table.

    The first model input is table.first_scale * sample; the row of the last call gives one as well, which nobody needs.

    timesteps: those of the loop, in the scheduler's dtype and where it keeps them. PNDM makes one call more than steps.
    draws: which calls take noise from the pipeline's generator, in this order and nowhere else between them; a call
    that draws may still have no use for it. noise_dtype: what the noise is drawn in, the prediction's dtype where None.
    start: the scheduler's step_index at call 0, None where it keeps none.
    wide_pictures: the picture that the scheduler's step returns beside the next sample is float32 at least.
    """

    table: StepTable
    timesteps: torch.Tensor
    draws: tuple[bool, ...]
    noise_dtype: torch.dtype | None = None
    start: int | None = None
    wide_pictures: bool = False

    @property
    def calls(self) -> int:
        return len(self.draws)

    def noise(
        self, call: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device, generator: Generators = None
    ) -> torch.Tensor | None:
        """What the scheduler would draw at this call for a prediction of this shape, dtype and device; or None."""
        if not self.draws[call]:
            return None
        dtype = self.noise_dtype or dtype
        generators = generator if isinstance(generator, list) else [generator]
        # A generator on the CPU gives the same picture for every device: the noise is drawn there and moved.
        on_cpu = generators[0] is not None and generators[0].device.type == "cpu"
        place = torch.device("cpu") if on_cpu else device
        if len(generators) == 1:
            return torch.randn(tuple(shape), generator=generators[0], dtype=dtype, device=place).to(device)
        each = (1, *shape[1:])
        drawn = [torch.randn(each, generator=generators[i], dtype=dtype, device=place) for i in range(shape[0])]
        return torch.cat(drawn).to(device)

    def advance(self, scheduler: Any, calls: int) -> None:
        """Set the scheduler's counters as if its own step had been called so often.

        Inpainting's add_noise finds its noise level by step_index. The outputs that a multistep scheduler remembers are
        in guided_step's states alone: its own step cannot take over before the next set_timesteps.
        """
        if self.start is not None:
            scheduler._step_index = self.start + calls  # noqa: SLF001 -- step_index has no setter
        if hasattr(scheduler, "lower_order_nums"):
            scheduler.lower_order_nums = min(calls, scheduler.config.solver_order)
        if hasattr(scheduler, "ets"):
            scheduler.counter = calls


@dataclass(frozen=True)
class _Schedule:
    """A scheduler and the part of its schedule that a loop goes through."""

    scheduler: Any
    every: list[float]
    times: list[float]
    start: int
    eta: float

    @property
    def config(self) -> Any:
        return self.scheduler.config

    @property
    def stride(self) -> int:
        return int(self.config.num_train_timesteps // self.scheduler.num_inference_steps)

    def alphas(self, times: list[float]) -> list[float]:
        """alphas_cumprod, once the timesteps are known to be places in it."""
        alphas = _numbers(self.scheduler.alphas_cumprod)
        if not all(isinstance(t, int) and 0 <= t < len(alphas) for t in times):
            raise _refusal(self.scheduler, f"timesteps that are not integers from 0 to {len(alphas) - 1}")
        return alphas

    def levels(self) -> list[float]:
        """The sigmas from the first call on, to the end of the schedule, even where the loop ends before it."""
        return _numbers(self.scheduler.sigmas)[self.start : len(self.scheduler.timesteps) + 1]


Built: TypeAlias = "tuple[StepTable, list[bool], torch.dtype | None]"


def _numbers(values: torch.Tensor) -> list[float]:
    # One copy to the host, where going through a tensor on a GPU would wait for it a thousand times.
    numbers: list[float] = values.tolist()
    return numbers


def _refusal(scheduler: Any, reason: str) -> Unsupported:
    return Unsupported("The step table", f"{type(scheduler).__name__} with {reason}")


def _ddim(run: _Schedule) -> Built:
    if not 0 <= run.eta <= 1:
        raise _refusal(run.scheduler, f"eta={run.eta}")
    alphas, final = run.alphas(run.times), float(run.scheduler.final_alpha_cumprod)
    table = tables.ddim(alphas, run.times, run.stride, final, run.config.prediction_type, run.eta)
    return table, [run.eta > 0] * len(run.times), None


def _pndm(run: _Schedule) -> Built:
    alphas, final = run.alphas(run.times), float(run.scheduler.final_alpha_cumprod)
    # Call 1 goes back a stride, which a schedule of less than one, cut by img2img, may not have room for.
    if len(run.times) > 1 and run.times[1] + run.stride >= len(alphas):
        raise _refusal(run.scheduler, f"timestep {run.times[1]} at the second call")
    table = tables.pndm(alphas, run.times, run.stride, final, run.config.prediction_type)
    return table, [False] * len(run.times), None


def _lcm(run: _Schedule) -> Built:
    # A step needs the timestep after its own, and the noise stops by the number of steps, not by the last timestep.
    times = run.every
    if run.scheduler.num_inference_steps != len(times):
        raise _refusal(run.scheduler, f"{len(times)} timesteps for {run.scheduler.num_inference_steps} steps")
    table = tables.lcm(run.alphas(times), times, run.config.prediction_type, run.config.timestep_scaling)
    draws = [run.start + call != len(times) - 1 for call in range(len(run.times))]
    left = replace(table, coefficients=table.coefficients[run.start :], pictures=(table.pictures or ())[run.start :])
    return left, draws, None


def _euler(run: _Schedule) -> Built:
    # Diffusers' older word.
    prediction = "sample" if run.config.prediction_type == "original_sample" else run.config.prediction_type
    return tables.euler(run.levels(), prediction), [False] * len(run.times), None


def _euler_ancestral(run: _Schedule) -> Built:
    # The last step draws, too, though it multiplies by 0: the generator is left as the scheduler leaves it.
    return tables.euler_ancestral(run.levels(), run.config.prediction_type), [True] * len(run.times), None


def _dpm_solver(run: _Schedule) -> Built:
    config, levels = run.config, run.levels()
    # By the length of the whole schedule, also where img2img leaves a part of it.
    short = config.lower_order_final and len(run.scheduler.timesteps) < 15
    first_order_end = bool(config.euler_at_final or short or config.final_sigmas_type == "zero")
    if levels[-1] == 0 and not first_order_end:
        raise _refusal(run.scheduler, "a second-order step to sigma 0")
    sde = config.algorithm_type == "sde-dpmsolver++"
    table = tables.dpmpp_2m(levels, config.prediction_type, first_order_end, sde)
    return table, [sde] * len(run.times), torch.float32 if sde else None


def _unipc(run: _Schedule) -> Built:
    scheduler, config = run.scheduler, run.config
    # Its step reads these two from itself, not from its config.
    if not scheduler.predict_x0 or scheduler.solver_p is not None:
        raise _refusal(scheduler, f"predict_x0={scheduler.predict_x0} and solver_p={scheduler.solver_p}")
    uncorrected = [step - run.start for step in scheduler.disable_corrector]
    table = tables.unipc(run.levels(), config.prediction_type, bool(config.lower_order_final), uncorrected)
    return table, [False] * len(run.times), None


@dataclass(frozen=True)
class _Known:
    """`options`: every option of the class and its accepted values; None: any, for its step does not read it.

    `indexed`: its step counts by step_index, not by the timestep it is given. `wide_pictures`: as of StepPlan.
    """

    build: Callable[[_Schedule], Built]
    options: Mapping[str, tuple[object, ...] | None]
    indexed: bool = True
    wide_pictures: bool = False


def _any(*names: str) -> dict[str, tuple[object, ...] | None]:
    return dict.fromkeys(names)


_OFF: tuple[object, ...] = (False, None)
_THREE = tables.PREDICTIONS
_TWO = ("epsilon", "v_prediction")
_BETAS = _any("num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas")
_SPACING = _any("timestep_spacing", "steps_offset")
_LEVELS = _any("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "final_sigmas_type")
_UNTHRESHOLDED = {"thresholding": _OFF, **_any("dynamic_thresholding_ratio", "sample_max_value")}
_UNCLIPPED = {"clip_sample": _OFF, **_any("clip_sample_range"), **_UNTHRESHOLDED}
_NO_FLOW = {"use_flow_sigmas": _OFF, "use_dynamic_shifting": _OFF, **_any("flow_shift", "time_shift_type")}
_ZERO_SNR = _any("rescale_betas_zero_snr")
_TO_ONE = _any("set_alpha_to_one")

_KNOWN = {
    "DDIMScheduler": _Known(
        _ddim,
        {**_BETAS, **_SPACING, **_UNCLIPPED, **_ZERO_SNR, **_TO_ONE, "prediction_type": _THREE},
        indexed=False,
    ),
    "PNDMScheduler": _Known(
        _pndm,
        {**_BETAS, **_SPACING, **_TO_ONE, "skip_prk_steps": (True,), "prediction_type": _TWO},
        indexed=False,
    ),
    "LCMScheduler": _Known(
        _lcm,
        {
            **_BETAS, **_SPACING, **_UNCLIPPED, **_ZERO_SNR, **_TO_ONE,
            **_any("original_inference_steps", "timestep_scaling"),
            "prediction_type": _THREE,
        },
    ),
    "EulerDiscreteScheduler": _Known(
        _euler,
        {
            **_BETAS, **_SPACING, **_LEVELS, **_ZERO_SNR,
            **_any("interpolation_type", "sigma_min", "sigma_max", "timestep_type"),
            "prediction_type": (*_THREE, "original_sample"),
        },
        wide_pictures=True,
    ),
    "EulerAncestralDiscreteScheduler": _Known(
        _euler_ancestral, {**_BETAS, **_SPACING, **_ZERO_SNR, "prediction_type": _TWO}, wide_pictures=True
    ),
    "DPMSolverMultistepScheduler": _Known(
        _dpm_solver,
        {
            **_BETAS, **_SPACING, **_LEVELS, **_ZERO_SNR, **_UNTHRESHOLDED, **_NO_FLOW,
            **_any("use_lu_lambdas", "lambda_min_clipped", "lower_order_final", "euler_at_final"),
            "solver_order": (2,),
            "solver_type": ("midpoint",),
            "algorithm_type": ("dpmsolver++", "sde-dpmsolver++"),
            "variance_type": (None,),
            "prediction_type": _THREE,
        },
    ),
    "UniPCMultistepScheduler": _Known(
        _unipc,
        {
            **_BETAS, **_SPACING, **_LEVELS, **_ZERO_SNR, **_UNTHRESHOLDED, **_NO_FLOW,
            **_any("lower_order_final", "disable_corrector", "sigma_min", "sigma_max"),
            "solver_order": (2,),
            "solver_type": ("bh2",),
            "predict_x0": (True,),
            "solver_p": (None,),
            "shift_terminal": _OFF,
            "prediction_type": _THREE,
        },
    ),
}  # fmt: skip


@lru_cache(maxsize=64)
def _options_of(kind: Any) -> tuple[str, ...]:
    """The class's own: a config also keeps those of the class that it was converted from, which no step reads."""
    return tuple(signature(kind).parameters)


def require_known(scheduler: Any, methods: Methods | None = None) -> _Known:
    """Unsupported where it is of another class, has methods that are not Diffusers', or an option that is not known."""
    kind: Any = type(scheduler)
    known = _KNOWN.get(kind.__name__)
    if known is None or not kind.__module__.startswith("diffusers.schedulers."):
        raise Unsupported("The step table", f"the scheduler {kind.__module__}.{kind.__qualname__}")
    own = (methods or Methods(scheduler)).own
    if own is not None:
        raise _refusal(scheduler, own)
    for name in _options_of(kind):
        if name not in known.options:
            raise _refusal(scheduler, f"the unknown option {name}")
        accepted, value = known.options[name], scheduler.config[name]
        if accepted is not None and value not in accepted:
            raise _refusal(scheduler, f"{name}={value!r}")
    return known


def _first_index(scheduler: Any, every: list[float], first: float | None) -> int:
    """The step_index of the first call, found as the scheduler's own step finds it."""
    for index in (scheduler.step_index, scheduler.begin_index):
        if index is not None:
            return int(index)
    places = [place for place, time in enumerate(every) if time == (every[0] if first is None else first)]
    if not places:
        raise _refusal(scheduler, f"a first timestep {first} that is not one of its own")
    # Of a timestep that stands there twice, the second.
    return places[min(1, len(places) - 1)]


def _loop(
    scheduler: Any, timesteps: torch.Tensor | Sequence[float] | int | None, every: list[float]
) -> tuple[list[float] | None, torch.Tensor]:
    """The values of the timesteps that were asked for, if any were, and the tensor that they are in."""
    if timesteps is None:
        return None, scheduler.timesteps
    if isinstance(timesteps, int):
        return every[timesteps:], scheduler.timesteps[timesteps:]
    asked = torch.as_tensor(timesteps)
    return _numbers(asked), asked


def step_table(
    scheduler: Any,
    timesteps: torch.Tensor | Sequence[float] | int | None = None,
    eta: float = 0.0,
    every: Sequence[float] | None = None,
) -> StepPlan:
    """The plan of a loop over `timesteps`, or from where the scheduler would begin to its end; Unsupported if none.

    To be called after set_timesteps and set_begin_index and before the first step. `timesteps`: a part of the
    scheduler's own without a gap, as image-to-image or a split between two models leaves it, or the number of the first
    one. `eta`: as the pipeline's. `every`: the values of scheduler.timesteps, where reading them would wait for a GPU.
    """
    known = require_known(scheduler)
    if scheduler.num_inference_steps is None:
        raise _refusal(scheduler, "no timesteps set")
    if not isinstance(scheduler.num_inference_steps, int):
        raise _refusal(scheduler, f"{scheduler.num_inference_steps} steps")
    if getattr(scheduler, "lower_order_nums", 0) or getattr(scheduler, "counter", 0):
        raise _refusal(scheduler, "a run that has begun")
    all_times = _numbers(scheduler.timesteps) if every is None else list(every)
    times, of_the_loop = _loop(scheduler, timesteps, all_times)
    start = _first_index(scheduler, all_times, times[0] if times else None) if known.indexed else 0
    if times is None:
        times = all_times[start:]
    if not times:
        raise _refusal(scheduler, "no timestep to run")
    run = _Schedule(scheduler, all_times, times, start, float(eta))
    if known.indexed:
        of_the_loop = scheduler.timesteps[start : start + len(times)]
        if times != all_times[start : start + len(times)]:
            raise _refusal(scheduler, f"timesteps that are not its own from number {start} on")
    try:
        table, draws, noise_dtype = known.build(run)
    except (ArithmeticError, ValueError) as error:
        raise _refusal(scheduler, f"noise levels that have no finite step ({error})") from error
    rows = table.coefficients[: len(times)]
    if len(rows) != len(times) or not bool(rows.isfinite().all()):
        raise _refusal(scheduler, "noise levels that have no finite step")
    table = replace(table, coefficients=rows, pictures=table.pictures and table.pictures[: len(times)])
    return StepPlan(
        table, of_the_loop, tuple(draws), noise_dtype, start if known.indexed else None, known.wide_pictures
    )
