"""Plans, against loops over the schedulers of diffusers themselves, written as their pipelines write them."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature

import pytest
import torch

from rocm_sd.engine.schedule import step_plan
from rocm_sd.engine.schedule.step_plan import step_table
from rocm_sd.errors import Unsupported
from rocm_sd.ops import guided_step

diffusers = pytest.importorskip("diffusers")

SHAPE = (2, 4, 3, 5)
GUIDANCE = 5.0
BETAS = {"num_train_timesteps": 1000, "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
DDIM, PNDM, LCM = "DDIMScheduler", "PNDMScheduler", "LCMScheduler"
EULER, ANCESTRAL = "EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler"
DPM, UNIPC = "DPMSolverMultistepScheduler", "UniPCMultistepScheduler"
EVERY = (DDIM, PNDM, LCM, EULER, ANCESTRAL, DPM, UNIPC)
# What each needs to be accepted at all.
NEEDED = {DDIM: {"clip_sample": False}, PNDM: {"skip_prk_steps": True}}
EPSILON, V, SAMPLE = {"prediction_type": "epsilon"}, {"prediction_type": "v_prediction"}, {"prediction_type": "sample"}
KARRAS, EXPONENTIAL, BETA = ({f"use_{kind}_sigmas": True} for kind in ("karras", "exponential", "beta"))
LEADING, TRAILING, LINSPACE = ({"timestep_spacing": spacing} for spacing in ("leading", "trailing", "linspace"))
ZERO_SNR, SIGMA_MIN = {"rescale_betas_zero_snr": True}, {"final_sigmas_type": "sigma_min"}
SDE = {"algorithm_type": "sde-dpmsolver++"}
COSINE = {"beta_schedule": "squaredcos_cap_v2"}

SPACINGS = [LEADING | {"steps_offset": 1}, TRAILING, LINSPACE]
SPACED_SIGMAS = [KARRAS, EXPONENTIAL, BETA, SIGMA_MIN, KARRAS | SIGMA_MIN]
ACCEPTED = {
    DDIM: [
        *SPACINGS, V, SAMPLE, {"set_alpha_to_one": False}, ZERO_SNR | TRAILING | V, ZERO_SNR | TRAILING | SAMPLE,
        COSINE, {"sample_max_value": 3.0, "dynamic_thresholding_ratio": 0.5, "clip_sample_range": 2.0},
    ],
    PNDM: [*SPACINGS, V, {"set_alpha_to_one": True}, {"beta_schedule": "linear"}],
    LCM: [{}, V, SAMPLE, {"timestep_scaling": 0.003}, {"set_alpha_to_one": False}, ZERO_SNR | V],
    EULER: [
        *SPACINGS, V, SAMPLE, {"prediction_type": "original_sample"}, *SPACED_SIGMAS, KARRAS | V,
        ZERO_SNR | TRAILING | V, {"interpolation_type": "log_linear"}, {"timestep_type": "continuous"} | V,
        KARRAS | {"sigma_min": 0.1, "sigma_max": 9.0},
    ],
    ANCESTRAL: [*SPACINGS, V, ZERO_SNR | TRAILING | V],
    DPM: [
        *SPACINGS, V, SAMPLE, *SPACED_SIGMAS, KARRAS | V, {"use_lu_lambdas": True}, ZERO_SNR | TRAILING | V,
        COSINE | {"lambda_min_clipped": -5.1}, {"lower_order_final": False}, SIGMA_MIN | {"lower_order_final": False},
        {"euler_at_final": True}, SIGMA_MIN | {"euler_at_final": True}, SDE, SDE | KARRAS, SDE | V | SIGMA_MIN,
        SDE | KARRAS | {"euler_at_final": True},
    ],
    UNIPC: [
        *SPACINGS, V, SAMPLE, *SPACED_SIGMAS, KARRAS | V, ZERO_SNR | TRAILING | V, {"disable_corrector": [0, 3]},
        SIGMA_MIN | {"lower_order_final": False},
    ],
}  # fmt: skip


def named(options):
    return ",".join(f"{name}={value}" for name, value in options.items()) or "defaults"


def scheduler_of(kind, options=None, steps=10):
    scheduler = getattr(diffusers, kind)(**{**BETAS, **NEEDED.get(kind, {}), **(options or {})})
    scheduler.set_timesteps(steps)
    return scheduler


class Model:
    """Predictions that depend on the sample and on the call: [2B, ...] to [2B, ...]."""

    def __init__(self, calls):
        random = torch.Generator().manual_seed(3)
        self.mix = torch.randn(4, 4, generator=random) / 4
        self.offsets = torch.randn(calls, 2 * SHAPE[0], *SHAPE[1:], generator=random)

    def __call__(self, x, call):
        return torch.einsum("oc,bchw->bohw", self.mix.to(x), x).tanh() + self.offsets[call].to(x)


def stock(scheduler, timesteps, model, sample, generator, eta=0.0):
    """Model inputs and samples of StableDiffusionPipeline's loop."""
    taken = {"generator": generator, "eta": eta}
    taken = {name: value for name, value in taken.items() if name in signature(scheduler.step).parameters}
    inputs, samples = [], []
    for call, t in enumerate(timesteps):
        inputs.append(scheduler.scale_model_input(torch.cat([sample] * 2), t))
        u, c = model(inputs[-1], call).chunk(2)
        sample = scheduler.step(u + GUIDANCE * (c - u), t, sample, **taken, return_dict=False)[0]
        samples.append(sample)
    return inputs, samples


def in_double(scheduler):
    """The same numbers, with the scheduler's own arithmetic on them in float64, where it does not insist on float32."""
    for name in ("sigmas", "alphas_cumprod", "final_alpha_cumprod"):
        if hasattr(scheduler, name):
            setattr(scheduler, name, getattr(scheduler, name).double())
    return scheduler


def planned(plan, model, sample, generator):
    states = torch.zeros(plan.table.states, *SHAPE)
    states[0] = sample
    following = torch.cat([sample * plan.table.first_scale] * 2)
    inputs, samples = [], []
    for call in range(plan.calls):
        inputs.append(following)
        noise = plan.noise(call, SHAPE, sample.dtype, sample.device, generator)
        step = torch.tensor(call)
        states, following = guided_step(
            model(inputs[-1], call), states, plan.table.coefficients, step, GUIDANCE, noise, implementation="torch"
        )
        samples.append(states[0])
    return inputs, samples


def error(ours, exact):
    return float((ours.double() - exact.double()).abs().max() / exact.double().abs().max())


def check(make, timesteps_of=lambda scheduler: scheduler.timesteps, eta=0.0, given=True, rounding=1e-4):
    """`make` gives a scheduler ready to run, anew each time; `rounding`: its own, in float32."""
    scheduler = make()
    timesteps = timesteps_of(scheduler)
    plan = step_table(scheduler, timesteps if given else None, eta)
    assert torch.equal(plan.timesteps, timesteps)
    assert plan.timesteps.dtype == timesteps.dtype
    assert plan.calls == len(timesteps) == len(plan.table.coefficients)
    model = Model(plan.calls)
    sample = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) * float(scheduler.init_noise_sigma)
    draws = [torch.Generator().manual_seed(1) for _ in range(2)]
    theirs = stock(scheduler, timesteps, model, sample, draws[0], eta)
    ours = planned(plan, model, sample, draws[1])
    assert torch.equal(draws[0].get_state(), draws[1].get_state())
    with pytest.MonkeyPatch.context() as patch:
        randn = torch.randn
        patch.setattr(torch, "randn", lambda *a, dtype, **named: randn(*a, dtype=torch.float32, **named).to(dtype))
        exact = stock(in_double(make()), timesteps, model, sample.double(), torch.Generator().manual_seed(1), eta)
    for our_list, their_list, exact_list in zip(ours, theirs, exact, strict=True):
        for call, (our, their, true) in enumerate(zip(our_list, their_list, exact_list, strict=True)):
            # Each is the scheduler's function: it rounds to float32 after every operation, the table once a row.
            assert error(their, true) < rounding, f"call {call}"
            assert error(our, true) < 2e-6, f"call {call}"
    return plan


@pytest.mark.parametrize("steps", [5, 10, 20])
@pytest.mark.parametrize(
    ("kind", "options"),
    [pytest.param(kind, o, id=f"{kind}-{named(o)}") for kind, variants in ACCEPTED.items() for o in variants],
)
def test_the_loop_gives_the_schedulers_trajectory(kind, options, steps):
    check(lambda: scheduler_of(kind, options, steps), given=steps != 5)


@pytest.mark.parametrize("eta", [0.3, 1.0])
@pytest.mark.parametrize("options", [EPSILON, V | ZERO_SNR | TRAILING, {"set_alpha_to_one": False}], ids=named)
def test_ddim_with_eta_draws_at_each_step(options, eta):
    # From an SNR of 0 and with eta 1, what is left of the old noise is the root of a difference of equal numbers.
    plan = check(lambda: scheduler_of(DDIM, options), eta=eta, rounding=1e-3 if eta == 1 else 1e-4)
    assert plan.draws == (True,) * 10


# Whole schedules of 20 are above the 15 under which DPM-Solver ends with first order; the parts left here are below.
@pytest.mark.parametrize("cut", [slice(1, None), slice(2, None), slice(13, None), slice(19, None)], ids=str)
@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, {}) for kind in EVERY]
    + [(PNDM, V), (DPM, SIGMA_MIN), (DPM, SDE | KARRAS), (UNIPC, {"disable_corrector": [0, 3, 14]}), (EULER, KARRAS)],
)
@pytest.mark.parametrize("begin", [True, False], ids=["begin_index", "slice"])
def test_a_run_from_the_middle_starts_as_image_to_image_does(kind, options, cut, begin):
    def make():
        scheduler = scheduler_of(kind, options, 20)
        if begin and hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(cut.start)
        return scheduler

    plan = check(make, lambda scheduler: scheduler.timesteps[cut])
    assert plan.start == (None if kind in {DDIM, PNDM} else cut.start)


@pytest.mark.parametrize("kind", EVERY)
def test_a_run_may_stop_before_the_end(kind):
    check(lambda: scheduler_of(kind), lambda scheduler: scheduler.timesteps[:7])


def test_without_timesteps_the_begin_index_counts():
    def make():
        scheduler = scheduler_of(DPM)
        scheduler.set_begin_index(4)
        return scheduler

    assert check(make, lambda scheduler: scheduler.timesteps[4:], given=False).start == 4


def test_a_scaled_model_input_is_not_yet_a_step():
    scheduler = scheduler_of(EULER)
    before = step_table(scheduler)
    scheduler.scale_model_input(torch.zeros(SHAPE), scheduler.timesteps[0])
    assert torch.equal(step_table(scheduler, scheduler.timesteps).table.coefficients, before.table.coefficients)


@pytest.mark.parametrize("kind", EVERY)
def test_one_step(kind):
    check(lambda: scheduler_of(kind, steps=1))


STABILITY = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "trained_betas": None}
OF_ALL = STABILITY | {"clip_sample": False, "set_alpha_to_one": False, "skip_prk_steps": True, "steps_offset": 1}
OF_XL = OF_ALL | EPSILON | {"interpolation_type": "linear", "sample_max_value": 1.0, "use_karras_sigmas": False}
SHIPPED = {
    "sd15": (PNDM, OF_ALL, 50),
    "sd21": (DDIM, OF_ALL | V, 50),
    "sdxl": (EULER, OF_XL | LEADING, 30),
    "turbo": (ANCESTRAL, OF_XL | TRAILING, 4),
    "lightning": (EULER, OF_XL | TRAILING, 4),
    "lcm": (
        LCM,
        OF_ALL | EPSILON | LEADING | {
            "clip_sample_range": 1.0, "dynamic_thresholding_ratio": 0.995, "thresholding": False,
            "original_inference_steps": 50, "rescale_betas_zero_snr": False, "sample_max_value": 1.0,
            "set_alpha_to_one": True, "timestep_scaling": 10.0,
        },
        4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("model", SHIPPED)
def test_the_schedulers_that_models_ship_with(model):
    kind, config, steps = SHIPPED[model]

    def make():
        scheduler = getattr(diffusers, kind).from_config({"_class_name": kind, **config})
        scheduler.set_timesteps(steps)
        return scheduler

    plan = check(make)
    assert plan.calls == steps + (kind == PNDM)
    assert plan.draws == {ANCESTRAL: (True,) * 4, LCM: (True, True, True, False)}.get(kind, (False,) * plan.calls)


@pytest.mark.parametrize("kind", EVERY)
def test_a_scheduler_made_from_anothers_config(kind):
    """Options that only the other class knows stay in its config, and change nothing."""
    _, sdxl, _ = SHIPPED["sdxl"]

    def make():
        scheduler = getattr(diffusers, kind).from_config(sdxl | {"thresholding_of_another": True})
        scheduler.set_timesteps(8)
        return scheduler

    check(make)


REFUSED = [
    (DDIM, {"clip_sample": True}, "clip_sample=True"),
    (LCM, {"clip_sample": True}, "clip_sample=True"),
    *[(kind, {"thresholding": True}, "thresholding=True") for kind in (DDIM, LCM, DPM, UNIPC)],
    (DDIM, {"prediction_type": "flow"}, "prediction_type='flow'"),
    (DDIM, ZERO_SNR | TRAILING, "no finite step"),
    (LCM, ZERO_SNR, "no finite step"),
    (PNDM, {"skip_prk_steps": False}, "skip_prk_steps=False"),
    (PNDM, SAMPLE, "prediction_type='sample'"),
    (ANCESTRAL, SAMPLE, "prediction_type='sample'"),
    *[(DPM, {"solver_order": order}, f"solver_order={order}") for order in (1, 3)],
    (DPM, {"solver_type": "heun"}, "solver_type='heun'"),
    *[(DPM, SIGMA_MIN | {"algorithm_type": t}, f"algorithm_type='{t}'") for t in ("dpmsolver", "sde-dpmsolver")],
    (DPM, {"variance_type": "learned_range"}, "variance_type='learned_range'"),
    *[(kind, {"use_flow_sigmas": True}, "use_flow_sigmas=True") for kind in (DPM, UNIPC)],
    (DPM, {"prediction_type": "flow_prediction"}, "prediction_type='flow_prediction'"),
    (DPM, {"use_dynamic_shifting": True}, "use_dynamic_shifting=True"),
    *[(UNIPC, {"solver_order": order}, f"solver_order={order}") for order in (1, 3)],
    (UNIPC, {"solver_type": "bh1"}, "solver_type='bh1'"),
    (UNIPC, {"predict_x0": False}, "predict_x0=False"),
    (UNIPC, {"lower_order_final": False}, "no finite step"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "options", "reason"), REFUSED, ids=[f"{k}-{named(o)}" for k, o, _ in REFUSED])
def test_what_is_not_linear_or_not_known_is_refused(kind, options, reason):
    with pytest.raises(Unsupported, match=f"{kind} with .*{reason}"):
        step_table(scheduler_of(kind, options))


def refused(scheduler, reason, *arguments, **named):
    with pytest.raises(Unsupported, match=reason):
        step_table(scheduler, *arguments, **named)


@pytest.mark.parametrize("kind", ["DDPMScheduler", "HeunDiscreteScheduler", "FlowMatchEulerDiscreteScheduler"])
def test_another_class_is_refused(kind):
    refused(getattr(diffusers, kind)(), f"the scheduler diffusers.*{kind}")


@pytest.mark.parametrize("name", [EULER, "Mine"])
def test_a_subclass_is_refused_under_any_name(name):
    mine = type(name, (getattr(diffusers, EULER),), {"__module__": "mine"})()
    mine.set_timesteps(5)
    refused(mine, f"the scheduler mine.{name}")


def test_a_step_of_the_instances_own_is_refused():
    scheduler = scheduler_of(EULER)
    scheduler.step = lambda *_arguments, **_named: None
    refused(scheduler, "a step of its own")


def test_an_option_that_diffusers_added_is_refused(monkeypatch):
    scheduler = scheduler_of(EULER)
    known = step_plan._KNOWN[EULER]
    fewer = {name: values for name, values in known.options.items() if name != "sigma_max"}
    monkeypatch.setitem(step_plan._KNOWN, EULER, replace(known, options=fewer))
    refused(scheduler, "the unknown option sigma_max")


@pytest.mark.parametrize("kind", EVERY)
def test_every_option_of_the_class_is_listed_and_no_other(kind):
    assert set(step_plan._KNOWN[kind].options) == set(signature(getattr(diffusers, kind)).parameters)


def test_timesteps_that_the_scheduler_would_not_run_are_refused():
    for kind in EVERY:
        refused(getattr(diffusers, kind)(**NEEDED.get(kind, {})), "no timesteps set")
        refused(scheduler_of(kind), "no timestep to run", torch.zeros(0))
    euler = scheduler_of(EULER)
    refused(euler, "first timestep 5.5 that is not", [5.5, 2.5])
    refused(euler, "not its own from number 2", euler.timesteps[2::2])
    refused(scheduler_of(DDIM), "not integers from 0 to 999", [1200, 3])
    refused(scheduler_of(DDIM), "not integers from 0 to 999", [30.0, 3.0])
    refused(scheduler_of(PNDM), "timestep 900 at the second call", [900, 900])
    refused(scheduler_of(DDIM), "eta=1.5", eta=1.5)
    euler.set_begin_index(3)
    refused(euler, "not its own from number 3", euler.timesteps)
    euler.set_timesteps(sigmas=[9.0, 1.0, 0.0, 2.0, 0.0])
    refused(euler, "no finite step", euler.timesteps)
    lcm = scheduler_of(LCM)
    lcm.set_timesteps(timesteps=[999, 759, 499, 259], strength=0.5)
    refused(lcm, "2 timesteps for 4 steps")


@pytest.mark.parametrize("kind", EVERY)
def test_advance_leaves_the_counters_that_the_scheduler_would(kind):
    fused, own = scheduler_of(kind), scheduler_of(kind)
    plan = step_table(fused)
    stock(own, own.timesteps[:4], Model(4), torch.ones(SHAPE), None)
    plan.advance(fused, 4)
    for counter in ("step_index", "counter", "lower_order_nums"):
        assert getattr(fused, counter, None) == getattr(own, counter, None), counter
    if kind in {PNDM, DPM, UNIPC}:
        refused(fused, "a run that has begun", fused.timesteps[4:])


def test_a_list_of_generators_draws_each_picture_from_its_own():
    plan = step_table(scheduler_of(ANCESTRAL))
    generators = [torch.Generator().manual_seed(seed) for seed in range(SHAPE[0])]
    drawn = plan.noise(0, SHAPE, torch.float32, torch.device("cpu"), generators)
    for seed, noise in enumerate(drawn):
        assert torch.equal(noise, torch.randn((1, *SHAPE[1:]), generator=torch.Generator().manual_seed(seed))[0])


def test_the_noise_is_drawn_in_the_dtype_that_the_scheduler_draws_in():
    device, half = torch.device("cpu"), torch.float16
    assert step_table(scheduler_of(ANCESTRAL)).noise(0, SHAPE, half, device).dtype == half
    assert step_table(scheduler_of(DPM, SDE)).noise(0, SHAPE, half, device).dtype == torch.float32
    assert step_table(scheduler_of(DPM)).noise(0, SHAPE, half, device) is None
