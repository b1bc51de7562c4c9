"""The tables, against the schedulers of diffusers themselves."""

from __future__ import annotations

from inspect import signature

import pytest
import torch

from rocm_sd.errors import InvalidOption
from rocm_sd.ops import guided_step
from rocm_sd.ops.guided_step import tables

STABLE_DIFFUSION = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
}
SHAPE = (2, 4, 3, 5)


def of_alphas(build, scheduler, steps, **options):
    numbers = scheduler.alphas_cumprod, scheduler.timesteps, 1000 // steps, float(scheduler.final_alpha_cumprod)
    return build(*numbers, scheduler.config.prediction_type, **options)


def of_sigmas(build, scheduler, _steps, **options):
    return build(scheduler.sigmas, scheduler.config.prediction_type, **options)


def of_lcm(build, scheduler, _steps):
    return build(scheduler.alphas_cumprod, scheduler.timesteps, scheduler.config.prediction_type)


BOTH = ("epsilon", "v_prediction")
ALL = (*BOTH, "sample")
# name: the scheduler's class, its settings, how its table is built, which predictions it takes.
SCHEDULERS = {
    "ddim": (
        "DDIMScheduler",
        {"clip_sample": False, "steps_offset": 1, "set_alpha_to_one": False},
        of_alphas, "ddim", {}, ALL,
    ),
    "ddim_to_one": ("DDIMScheduler", {"clip_sample": False}, of_alphas, "ddim", {}, BOTH),
    "ddim_eta": ("DDIMScheduler", {"clip_sample": False}, of_alphas, "ddim", {"eta": 0.7}, BOTH),
    "ddim_zero_snr": (
        "DDIMScheduler",
        {"clip_sample": False, "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"},
        of_alphas, "ddim", {}, ("v_prediction",),
    ),
    "euler": (
        "EulerDiscreteScheduler", {"timestep_spacing": "leading", "steps_offset": 1}, of_sigmas, "euler", {}, ALL,
    ),
    "euler_karras": ("EulerDiscreteScheduler", {"use_karras_sigmas": True}, of_sigmas, "euler", {}, BOTH),
    "euler_ancestral": ("EulerAncestralDiscreteScheduler", {}, of_sigmas, "euler_ancestral", {}, BOTH),
    "dpmpp_2m": ("DPMSolverMultistepScheduler", {}, of_sigmas, "dpmpp_2m", {}, ALL),
    "dpmpp_2m_karras": ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}, of_sigmas, "dpmpp_2m", {}, BOTH),
    "dpmpp_2m_sigma_min": (
        "DPMSolverMultistepScheduler", {"final_sigmas_type": "sigma_min"}, of_sigmas, "dpmpp_2m", {}, BOTH,
    ),
    "dpmpp_2m_euler_at_final": (
        "DPMSolverMultistepScheduler",
        {"final_sigmas_type": "sigma_min", "euler_at_final": True},
        of_sigmas, "dpmpp_2m", {"first_order_end": True}, BOTH,
    ),
    "dpmpp_2m_sde": (
        "DPMSolverMultistepScheduler",
        {"algorithm_type": "sde-dpmsolver++", "use_karras_sigmas": True},
        of_sigmas, "dpmpp_2m", {"sde": True}, BOTH,
    ),
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True, "steps_offset": 1}, of_alphas, "pndm", {}, BOTH),
    "pndm_to_one": ("PNDMScheduler", {"skip_prk_steps": True, "set_alpha_to_one": True}, of_alphas, "pndm", {}, BOTH),
    "unipc": ("UniPCMultistepScheduler", {}, of_sigmas, "unipc", {}, ALL),
    "unipc_karras": ("UniPCMultistepScheduler", {"use_karras_sigmas": True}, of_sigmas, "unipc", {}, BOTH),
    "unipc_uncorrected": (
        "UniPCMultistepScheduler", {"disable_corrector": [0, 3]}, of_sigmas, "unipc", {"uncorrected": [0, 3]}, BOTH,
    ),
    "unipc_full_order": (
        "UniPCMultistepScheduler",
        {"lower_order_final": False, "final_sigmas_type": "sigma_min"},
        of_sigmas, "unipc", {"lower_order_final": False}, BOTH,
    ),
    "lcm": ("LCMScheduler", {}, of_lcm, "lcm", {}, ALL),
}  # fmt: skip


def trajectory(scheduler, predictions, sample, generator, eta):
    """The samples and the model inputs of diffusers' own run."""
    samples, model_inputs = [], []
    for number, (t, e) in enumerate(zip(scheduler.timesteps, predictions, strict=True)):
        scheduler.scale_model_input(sample, t)
        possible = {"generator": generator, "eta": eta}
        taken = {n: v for n, v in possible.items() if n in signature(scheduler.step).parameters}
        sample = scheduler.step(e, t, sample, **taken).prev_sample
        following = scheduler.timesteps[number + 1 :]
        samples.append(sample)
        model_inputs.append(scheduler.scale_model_input(sample, following[0]) if len(following) else None)
    return samples, model_inputs


def scheduler_of(name, prediction_type, steps):
    diffusers = pytest.importorskip("diffusers")
    class_name, settings, numbers, builder, options, _ = SCHEDULERS[name]
    scheduler = getattr(diffusers, class_name)(**STABLE_DIFFUSION, **settings, prediction_type=prediction_type)
    scheduler.set_timesteps(steps)
    return scheduler, numbers(getattr(tables, builder), scheduler, steps, **options)


@pytest.mark.parametrize("steps", [10, 20])
@pytest.mark.parametrize(
    ("name", "prediction_type"), [(name, kind) for name, entry in SCHEDULERS.items() for kind in entry[-1]]
)
def test_the_trajectory_is_that_of_the_scheduler(name, prediction_type, steps, device):
    scheduler, table = scheduler_of(name, prediction_type, steps)
    random = torch.Generator().manual_seed(0)
    count = len(scheduler.timesteps)
    outputs = torch.randn(count, 2, *SHAPE, generator=random)
    sample = torch.randn(SHAPE, generator=random) * float(scheduler.init_noise_sigma)
    guided = [u + 5.0 * (c - u) for u, c in outputs]
    first_input = scheduler.scale_model_input(sample, scheduler.timesteps[0])
    torch.testing.assert_close(sample * table.first_scale, first_input, rtol=1e-5, atol=0)
    eta = SCHEDULERS[name][4].get("eta", 0.0)
    samples, model_inputs = trajectory(scheduler, guided, sample, torch.Generator().manual_seed(1), eta)

    assert table.coefficients.shape == (count, table.states + 1, table.states + 2)
    coefficients = table.coefficients.to(device)
    states = torch.zeros(table.states, *SHAPE, device=device)
    states[0] = sample
    step, draws = torch.zeros((), dtype=torch.int64, device=device), torch.Generator().manual_seed(1)
    for number in range(count):
        noise = torch.randn(SHAPE, generator=draws).to(device) if table.noisy else None
        states, model_input = guided_step(
            outputs[number].flatten(0, 1).to(device), states, coefficients, step, 5.0, noise
        )
        step += 1
        _close(states[0], samples[number])
        if number + 1 < count:
            _close(model_input.chunk(2)[0], model_inputs[number])
            assert torch.equal(*model_input.chunk(2))


def _close(ours, theirs):
    error = float((ours.cpu() - theirs).abs().max() / theirs.abs().max())
    assert error < 1e-5, f"relative error {error:.2g}"


@pytest.mark.parametrize("name", ["euler", "dpmpp_2m_karras", "pndm", "unipc", "lcm"])
def test_the_kernel_runs_a_whole_schedule_as_stock_torch_does(name, device):
    _, table = scheduler_of(name, "epsilon", 10)
    random = torch.Generator().manual_seed(0)
    runs = {}
    for implementation in ("torch", "triton"):
        random.manual_seed(0)
        states = torch.zeros(table.states, *SHAPE, device=device)
        states[0] = torch.randn(SHAPE, generator=random).to(device)
        for number in range(table.coefficients.shape[0]):
            e, noise = (torch.randn(n * SHAPE[0], *SHAPE[1:], generator=random).to(device) for n in (2, 1))
            step = torch.tensor([number], dtype=torch.int32, device=device)
            states, _ = guided_step(
                e, states, table.coefficients.to(device), step, 7.5, noise if table.noisy else None, implementation
            )
        runs[implementation] = states[0]
    _close(runs["triton"], runs["torch"].cpu())


@pytest.mark.parametrize("build", [tables.euler, tables.dpmpp_2m, tables.unipc])
def test_an_unknown_prediction_is_refused(build):
    with pytest.raises(InvalidOption, match="epsilon, v_prediction, sample"):
        build([10.0, 1.0, 0.0], "flow")


def test_pndm_has_no_prediction_of_the_picture():
    with pytest.raises(InvalidOption, match="epsilon, v_prediction"):
        tables.pndm([0.9, 0.5], [1, 0], 1, prediction="sample")
