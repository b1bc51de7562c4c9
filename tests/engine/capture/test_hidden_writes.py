"""What a callback writes behind torch's back is seen before the next step: keys, values and times are made anew."""

from __future__ import annotations

import diffusers
import pytest
import torch

import rocm_sd
from pipelines import CASES, DEVICE, Twins, small_blocks_too
from rocm_sd.engine.schedule import stepping


def through_data(tensor):
    tensor.data.mul_(0.5)


def through_numpy(tensor):
    tensor.numpy()[...] *= 0.5


def through_a_view_of_data(tensor):
    tensor.data.view(-1)[::2] += 1


@pytest.mark.skipif(DEVICE.type != "cpu", reason="on a GPU these writes cannot be seen without waiting for it")
@pytest.mark.parametrize("write", [through_data, through_numpy, through_a_view_of_data])
@pytest.mark.parametrize("step_graph", ["1", "0"], ids=["recorded", "one by one"])
@pytest.mark.parametrize(
    ("name", "tensor"),
    [("sd15", "prompt_embeds"), ("sdxl", "prompt_embeds"), ("sdxl", "add_text_embeds"), ("sdxl", "add_time_ids")],
)
def test_a_tensor_that_is_written_uncounted_is_used_as_it_is(name, tensor, write, step_graph, monkeypatch, tmp_path):
    small_blocks_too(monkeypatch, step_graph)
    twins = Twins(CASES[name], tmp_path)

    def callback(_pipe, step, _time, tensors):
        if step == 1:
            write(tensors[tensor])
        return tensors

    given = {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": ["latents", tensor]}
    for seed in range(2):
        twins.check(seed, **given)
    plain = twins.drawn(twins.stock)
    assert not torch.allclose(twins.drawn(twins.stock, **given), plain, atol=1e-4), "the write changes nothing"
    rocm_sd.restore(twins.ours)
    assert twins.are_equal(**given)


def test_a_timestep_that_is_written_uncounted_is_not_one_of_the_schedule():
    def run(scheduler):
        scheduler.set_timesteps(4)
        sample = torch.ones(1, 4, 8, 8)
        for number, t in enumerate(scheduler.timesteps):
            if number == 2:
                scheduler.timesteps.numpy()[2] -= 100
            sample = scheduler.step(torch.sin(sample), t, sample, return_dict=False)[0]
        return sample

    scheduler = diffusers.DDIMScheduler(clip_sample=False)
    known = stepping.hook(scheduler)
    torch.testing.assert_close(run(scheduler), run(diffusers.DDIMScheduler(clip_sample=False)))
    assert known.planned_steps >= 2
    scheduler.set_timesteps(4)
    current = known.run(scheduler)
    assert current.number_of(scheduler.timesteps[1]) == 1
    scheduler.timesteps.numpy()[1] += 1
    assert current.number_of(scheduler.timesteps[1]) is None
