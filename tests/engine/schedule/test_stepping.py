"""Schedulers that step from a table: the same samples as the scheduler's own step, whatever the caller does between."""

from __future__ import annotations

import copy
import inspect
import pickle

import diffusers
import pytest
import torch

import rocm_sd
from pipelines import tiny_unet
from rocm_sd.engine import denoising
from rocm_sd.engine.schedule import stepping
from rocm_sd.errors import Unsupported

NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
KNOWN = {
    "DDIM": lambda: diffusers.DDIMScheduler(clip_sample=False, **NOISE),
    "PNDM": lambda: diffusers.PNDMScheduler(skip_prk_steps=True, **NOISE),
    "Euler": lambda: diffusers.EulerDiscreteScheduler(**NOISE),
    "Euler ancestral": lambda: diffusers.EulerAncestralDiscreteScheduler(**NOISE),
    "DPM++ 2M": lambda: diffusers.DPMSolverMultistepScheduler(**NOISE),
    "DPM++ 2M Karras": lambda: diffusers.DPMSolverMultistepScheduler(use_karras_sigmas=True, **NOISE),
    "UniPC": lambda: diffusers.UniPCMultistepScheduler(
        **{name: value for name, value in NOISE.items() if name != "steps_offset"}
    ),
    "LCM": lambda: diffusers.LCMScheduler(**{name: value for name, value in NOISE.items() if name != "steps_offset"}),
}


def prediction(sample, t):
    """A model that is easy to follow: no two steps give the same."""
    return torch.sin(3 * sample + 0.01 * float(t))


def run(scheduler, steps=8, change=None, **named):
    scheduler.set_timesteps(steps)
    sample = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0)) * scheduler.init_noise_sigma
    extra = {}
    if "generator" in inspect.signature(scheduler.step).parameters:
        extra["generator"] = torch.Generator().manual_seed(1)
    pictures = []
    for number, t in enumerate(scheduler.timesteps):
        given = scheduler.scale_model_input(sample, t)
        sample, *picture = scheduler.step(prediction(given, t), t, sample, **extra, **named, return_dict=False)
        pictures += picture
        if change is not None:
            sample = change(number, sample)
    return [sample, *pictures]


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("change", [None, lambda number, sample: sample * 0.5 if number == 3 else sample])
def test_a_run_gives_what_the_schedulers_own_steps_give(name, change):
    stock = run(KNOWN[name](), change=change)
    scheduler = KNOWN[name]()
    known = stepping.hook(scheduler)
    for _ in range(2):
        ours = run(scheduler, change=change)
        assert len(ours) == len(stock)
        for mine, theirs in zip(ours, stock, strict=True):
            assert mine.dtype == theirs.dtype
            # The model multiplies a rounding by three in each step.
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
    assert known.planned_steps == 2 * len(scheduler.timesteps)
    assert known.why_fallback is None


def test_a_scheduler_that_has_no_table_steps_by_itself():
    scheduler = diffusers.HeunDiscreteScheduler(**NOISE)
    stock = run(diffusers.HeunDiscreteScheduler(**NOISE))
    known = stepping.hook(scheduler)
    assert torch.equal(run(scheduler)[0], stock[0])
    assert "HeunDiscreteScheduler" in known.why_fallback
    assert not known.planned_steps


@pytest.mark.parametrize("option", [{"clip_sample": True}, {"thresholding": True}])
def test_options_that_are_not_linear_are_left_to_the_scheduler(option):
    def make():
        return diffusers.DDIMScheduler(**{"clip_sample": False, **NOISE, **option})

    scheduler = make()
    known = stepping.hook(scheduler)
    assert torch.equal(run(scheduler)[0], run(make())[0])
    assert next(iter(option)) in known.why_fallback


def test_the_answer_as_an_object_is_stocks_own():
    scheduler, stock = KNOWN["DDIM"](), KNOWN["DDIM"]()
    stepping.hook(scheduler)
    sample = torch.randn(1, 4, 8, 8)
    for one in (scheduler, stock):
        one.set_timesteps(4)
    ours, theirs = (one.step(sample, one.timesteps[0], sample) for one in (scheduler, stock))
    assert type(ours) is type(theirs)
    assert torch.equal(ours.prev_sample, theirs.prev_sample)


def test_ddim_in_any_order_is_stocks():
    scheduler, stock = KNOWN["DDIM"](), KNOWN["DDIM"]()
    stepping.hook(scheduler)
    sample = torch.randn(1, 4, 8, 8)
    for one in (scheduler, stock):
        one.set_timesteps(6)
    for number in (0, 3, 1, 5):
        ours, theirs = (
            one.step(sample, one.timesteps[number], sample, return_dict=False)[0] for one in (scheduler, stock)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_multistep_scheduler_out_of_order_says_so():
    scheduler = KNOWN["PNDM"]()
    stepping.hook(scheduler)
    scheduler.set_timesteps(6)
    sample = torch.randn(1, 4, 8, 8)
    scheduler.step(sample, scheduler.timesteps[0], sample, return_dict=False)
    with pytest.raises(Unsupported, match="timesteps out of their order") as error:
        scheduler.step(sample, scheduler.timesteps[4], sample, return_dict=False)
    assert "ROCM_SD_STEP_GRAPH=0" in str(error.value)
    # The next run is a new beginning.
    torch.testing.assert_close(run(scheduler)[0], run(KNOWN["PNDM"]())[0], rtol=2e-4, atol=2e-4)


def test_a_run_that_was_broken_off_does_not_reach_the_next():
    scheduler = KNOWN["DPM++ 2M"]()
    stepping.hook(scheduler)

    class Broken(Exception):
        pass

    def break_off(number, sample):
        if number == 3:
            raise Broken
        return sample

    with pytest.raises(Broken):
        run(scheduler, change=break_off)
    torch.testing.assert_close(run(scheduler)[0], run(KNOWN["DPM++ 2M"]())[0], rtol=2e-4, atol=2e-4)


def test_the_signatures_stay_and_the_last_user_takes_the_hook_off():
    scheduler = KNOWN["Euler"]()
    before = {name: inspect.signature(getattr(scheduler, name)) for name in ("step", "set_timesteps")}
    first, second = stepping.hook(scheduler), stepping.hook(scheduler)
    assert first is second
    assert {name: inspect.signature(getattr(scheduler, name)) for name in before} == before
    first.unhook()
    assert "step" in vars(scheduler)
    second.unhook()
    assert not {"step", "set_timesteps"} & set(vars(scheduler))


def test_a_scheduler_with_a_step_of_its_own_keeps_it():
    scheduler = KNOWN["Euler"]()
    steps = []
    scheduler.step = lambda *_arguments, **_named: steps.append(1)
    assert stepping.hook(scheduler) is None
    scheduler.step(None, None, None)
    assert steps == [1]


def test_a_pickle_of_a_hooked_scheduler_can_be_hooked():
    scheduler = KNOWN["DPM++ 2M"]()
    stepping.hook(scheduler)
    again = pickle.loads(pickle.dumps(scheduler))
    known = stepping.hook(again)
    torch.testing.assert_close(run(again)[0], run(KNOWN["DPM++ 2M"]())[0], rtol=1e-3, atol=1e-3)
    assert known.planned_steps


def test_copies_of_a_hooked_scheduler_are_stock():
    scheduler = KNOWN["DPM++ 2M"]()
    known = stepping.hook(scheduler)
    stock = run(KNOWN["DPM++ 2M"]())
    for other in (copy.deepcopy(scheduler), pickle.loads(pickle.dumps(scheduler))):
        assert torch.equal(run(other)[0], stock[0])
    assert not known.planned_steps


def test_image_to_image_begins_in_the_middle():
    def part(scheduler):
        scheduler.set_timesteps(8)
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(3)
        sample = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
        for t in scheduler.timesteps[3:]:
            given = scheduler.scale_model_input(sample, t)
            sample = scheduler.step(prediction(given, t), t, sample, return_dict=False)[0]
        return sample

    for name in ("DDIM", "Euler", "DPM++ 2M", "UniPC"):
        scheduler = KNOWN[name]()
        known = stepping.hook(scheduler)
        torch.testing.assert_close(part(scheduler), part(KNOWN[name]()), rtol=2e-4, atol=2e-4)
        assert known.planned_steps == 5


def test_a_run_is_over_with_its_last_step():
    scheduler = KNOWN["DDIM"]()
    known = stepping.hook(scheduler)
    run(scheduler)
    assert known.run(scheduler) is None
    scheduler.set_timesteps(4)
    current = known.run(scheduler)
    assert current is not None
    assert [current.number_of(t) for t in scheduler.timesteps] == [0, 1, 2, 3]
    assert current.number_of(scheduler.timesteps[2:][1]) == 3
    assert current.number_of(torch.tensor(1)) is None
    assert current.number_of(7) is None


@pytest.mark.gpu
@torch.no_grad()
def test_the_loop_never_waits_for_the_gpu():
    """Torch raises at anything that would."""

    class Pipe:
        """As much of a pipeline as the engine looks at."""

        def __init__(self):
            self.unet, self.scheduler = tiny_unet().half().cuda().eval(), KNOWN["DPM++ 2M"]()
            self.components = {"unet": self.unet, "scheduler": self.scheduler}

    pipe = rocm_sd.optimize(Pipe())
    text = torch.randn(2, 7, pipe.unet.config.cross_attention_dim, device="cuda", dtype=torch.half)
    for picture in range(3):
        pipe.scheduler.set_timesteps(6, device="cuda")
        sample = torch.randn(1, 4, 8, 8, device="cuda", dtype=torch.half)
        try:
            torch.cuda.set_sync_debug_mode("error" if picture == 2 else "default")
            for t in pipe.scheduler.timesteps:
                given = pipe.scheduler.scale_model_input(torch.cat([sample, sample]), t)
                uncond, cond = pipe.unet(given, t, encoder_hidden_states=text, return_dict=False)[0].chunk(2)
                guided = uncond + 7.5 * (cond - uncond)
                sample = pipe.scheduler.step(guided, t, sample, return_dict=False)[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert denoising._CAPTURED[pipe.unet][0].replays >= 6
    assert bool(sample.isfinite().all())
