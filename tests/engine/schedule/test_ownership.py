"""What a program has put on a scheduler or on its class is what steps, whether it came before `optimize` or after."""

from __future__ import annotations

import functools
import types
from unittest.mock import patch

import diffusers
import pytest
import torch
from diffusers.schedulers import scheduling_euler_ancestral_discrete

import rocm_sd
from pipelines import CASES, Case, Twins, call, small_blocks_too
from rocm_sd.engine.schedule import stepping

CASE: Case = CASES["sd15"]


def halved(result):
    return (result[0] * 0.5, *result[1:])


def a_method(scheduler):
    own = scheduler.step

    def mine(_self, *args, **kwargs):
        return halved(own(*args, **kwargs))

    scheduler.step = types.MethodType(mine, scheduler)


def a_closure(scheduler):
    own = scheduler.step
    scheduler.step = lambda *args, **kwargs: halved(own(*args, **kwargs))


def wrapped_like_stock(scheduler):
    own = scheduler.step

    @functools.wraps(own)
    def mine(*args, **kwargs):
        return halved(own(*args, **kwargs))

    scheduler.step = mine


def a_callable_object(scheduler):
    class Halving:
        def __init__(self, own):
            self.own = own

        def __call__(self, *args, **kwargs):
            return halved(self.own(*args, **kwargs))

    scheduler.step = Halving(scheduler.step)


def its_timesteps(scheduler):
    own = scheduler.set_timesteps

    def mine(*args, **kwargs):
        own(*args, **kwargs)
        scheduler.timesteps = scheduler.timesteps // 2

    scheduler.set_timesteps = mine


ON_THE_INSTANCE = [a_method, a_closure, wrapped_like_stock, a_callable_object, its_timesteps]


@pytest.fixture(params=["1", "0"], ids=["recorded", "one by one"])
def recorded(request, monkeypatch):
    small_blocks_too(monkeypatch, request.param)
    return request.param == "1"


@pytest.mark.parametrize("change", ON_THE_INSTANCE)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_method_on_the_instance_is_what_steps(change, before, recorded, tmp_path):
    twins = Twins(CASE, tmp_path)
    if before:
        rocm_sd.restore(twins.ours)
    twins.each(lambda pipe: change(pipe.scheduler))
    own = {name: value for name, value in vars(twins.ours.scheduler).items() if name in ("step", "set_timesteps")}
    if before:
        rocm_sd.optimize(twins.ours)
    for seed in range(2):
        twins.check(seed)
    if recorded:
        notes = [note for note in rocm_sd.report(twins.ours).notes if note.startswith("DDIMScheduler")]
        assert any("of its own on the instance" in note for note in notes), notes
    rocm_sd.restore(twins.ours)
    if before:
        left = {name: value for name, value in vars(twins.ours.scheduler).items() if name in ("step", "set_timesteps")}
        assert left == own
    assert twins.are_equal(3)


def test_a_method_that_was_taken_off_again_makes_room_for_the_table(monkeypatch, tmp_path):
    small_blocks_too(monkeypatch, "1")
    twins = Twins(CASE, tmp_path)
    rocm_sd.restore(twins.ours)
    a_closure(twins.ours.scheduler)
    rocm_sd.optimize(twins.ours)
    del twins.ours.scheduler.step
    twins.check()
    assert "DDIMScheduler: 4 steps from a table on the device" in rocm_sd.report(twins.ours).notes


@pytest.mark.parametrize("name", ["step", "set_timesteps", "_get_variance"])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_patch_of_the_class_is_what_steps(name, before, recorded, tmp_path):
    kind = diffusers.DDIMScheduler
    own, calls = getattr(kind, name), []

    @functools.wraps(own)
    def mine(self, *args, **kwargs):
        calls.append(len(args))
        result = own(self, *args, **kwargs)
        if name == "set_timesteps":
            self.timesteps = self.timesteps // 2
        return halved(result) if name == "step" else result

    twins = Twins(CASE, tmp_path)
    if before:
        rocm_sd.restore(twins.ours)
    with patch.object(kind, name, mine):
        if before:
            rocm_sd.optimize(twins.ours)
        twins.check()
        calls.clear()
        twins.drawn(twins.ours)
        assert calls
        if recorded:
            expected = f"a {name} of its own on the class (mine of test_ownership)"
            assert any(expected in note for note in rocm_sd.report(twins.ours).notes)
    twins.check(1)
    if recorded:
        assert "DDIMScheduler: 4 steps from a table on the device" in rocm_sd.report(twins.ours).notes


def test_a_function_that_the_class_calls_is_what_draws(monkeypatch):
    own, calls = scheduling_euler_ancestral_discrete.randn_tensor, []

    def mine(*args, **kwargs):
        calls.append(1)
        return own(*args, **kwargs)

    monkeypatch.setattr(scheduling_euler_ancestral_discrete, "randn_tensor", mine)
    scheduler = diffusers.EulerAncestralDiscreteScheduler()
    known = stepping.hook(scheduler)
    scheduler.set_timesteps(3)
    sample = torch.randn(1, 4, 8, 8)
    for t in scheduler.timesteps:
        sample = scheduler.step(sample, t, sample, return_dict=False)[0]
    assert len(calls) == 3
    assert "a randn_tensor of its own" in known.why_fallback


class TakesAnything(diffusers.DDIMScheduler):
    def step(self, *args, **kwargs):
        return halved(super().step(*args, **kwargs))


class OtherNames(diffusers.DDIMScheduler):
    def step(self, noise, t, latents, **kwargs):
        return halved(super().step(noise, t, latents, **kwargs))


class Plain(diffusers.DDIMScheduler):
    pass


@pytest.mark.parametrize("kind", [TakesAnything, OtherNames, Plain])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_subclass_steps_as_it_does_by_itself(kind, before, recorded, tmp_path):
    twins = Twins(CASE, tmp_path)
    if before:
        rocm_sd.restore(twins.ours)
    for pipe in (twins.ours, twins.stock, twins.exact):
        pipe.scheduler = kind.from_config(pipe.scheduler.config)
    if before:
        rocm_sd.optimize(twins.ours)
    for seed in range(2):
        twins.check(seed)
    if recorded:
        assert any(f"the scheduler test_ownership.{kind.__name__}" in n for n in rocm_sd.report(twins.ours).notes)
    rocm_sd.restore(twins.ours)
    assert twins.are_equal()


@pytest.mark.usefixtures("recorded")
def test_a_step_is_called_in_the_form_that_the_pipeline_uses(tmp_path):
    """As Diffusers' own tests of several denoisers look at it: the timestep is the second argument by position."""
    pipe = CASE.build(tmp_path)
    rocm_sd.optimize(pipe)
    own, seen = diffusers.DDIMScheduler.step, []

    def mine(self, *args, **kwargs):
        seen.append((len(args), int(args[1]), sorted(kwargs)))
        return own(self, *args, **kwargs)

    def drawn():
        seen.clear()
        call(pipe, CASE)
        return list(seen)

    with patch.object(diffusers.DDIMScheduler, "step", mine):
        ours = drawn()
        rocm_sd.restore(pipe)
        assert ours == drawn()
    assert [count for count, _, _ in ours] == [3] * 4


def test_a_class_that_is_patched_in_the_middle_of_a_run_steps_from_then_on():
    def run(scheduler):
        scheduler.set_timesteps(4)
        sample = torch.ones(1, 4, 8, 8)
        for number, t in enumerate(scheduler.timesteps):
            with patch.object(type(scheduler), "step", patched if number >= 2 else own):
                sample = scheduler.step(sample, t, sample, return_dict=False)[0]
        return sample

    own = diffusers.DDIMScheduler.step

    def patched(self, *args, **kwargs):
        return halved(own(self, *args, **kwargs))

    scheduler = diffusers.DDIMScheduler(clip_sample=False)
    known = stepping.hook(scheduler)
    torch.testing.assert_close(run(scheduler), run(diffusers.DDIMScheduler(clip_sample=False)))
    assert known.planned_steps == 2
