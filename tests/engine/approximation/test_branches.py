"""Approximated pipelines give what their definition gives, as exactly as stock would compute that."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from approximated import Definition

import rocm_sd
from pipelines import CASES, call, exactly, require_as_exact_as_stock, scheduler_of, small_blocks_too
from rocm_sd.engine.approximation import Skipping

STEPS = 7
SETTINGS = {
    "cached": Skipping(depth=1, every=3),
    "deeper": Skipping(depth=3, every=2),
    "extrapolated": Skipping(depth=2, every=2, order=1),
    "guidance reused": Skipping(guided_every=3),
    "guidance ended": Skipping(guidance_end=0.5),
    "both": Skipping(depth=1, every=4, order=1, guided_every=2),
    "own schedule": Skipping(depth=1, whole=(0, 0.15, 0.3, 0.7), order=1, guided_every=2),
    "out of step": Skipping(depth=2, every=2, guided_every=3, guidance_end=0.8),
}
PIPELINES = ["sd15", "sdxl", "sd15-img2img", "sd15-inpaint9", "sd15-controlnet", "sdxl-img2img"]


@pytest.fixture(autouse=True, params=["0", "1"], ids=["stepwise", "captured"])
def step_graph(request, monkeypatch):
    small_blocks_too(monkeypatch, request.param)
    return request.param


def drawn(pipe, name, seed=0, **options):
    return call(pipe, CASES[name], seed, **{"num_inference_steps": STEPS, **options})


def check(folder, name, skipping, seeds=(0, 1, 2), scheduler=None, **options):
    pipes = [CASES[name].build(folder).to(dtype) for dtype in (torch.float32, torch.float32, torch.float64)]
    if scheduler is not None:
        for pipe in pipes:
            pipe.scheduler = scheduler_of(scheduler)
    ours = rocm_sd.optimize(pipes[0], quality=skipping)
    for pipe in pipes[1:]:
        Definition(pipe, skipping)
    mine = [drawn(ours, name, seed, **options) for seed in seeds]
    stock = [drawn(pipes[1], name, seed, **options) for seed in seeds]
    with exactly(torch.float32):
        exact = [drawn(pipes[2], name, seed, **options) for seed in seeds]
    require_as_exact_as_stock(mine, exact, stock, times=2)
    return ours, mine


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_setting_is_what_it_is_defined_to_be(tmp_path, setting):
    ours, _ = check(tmp_path, "sd15", SETTINGS[setting])
    assert any("is approximated" in note for note in rocm_sd.report(ours).notes)


@pytest.mark.parametrize("name", PIPELINES)
def test_each_pipeline(tmp_path, name):
    check(tmp_path, name, SETTINGS["both"])


@pytest.mark.parametrize(
    ("name", "end"), [("sd15", 0.0), ("sd15-img2img", 0.2), ("sd15-controlnet", 0.0), ("sdxl-img2img", 0.2)]
)
@pytest.mark.parametrize("order", [0, 1])
def test_a_picture_that_begins_behind_the_end_of_guidance(tmp_path, name, end, order):
    skipping = Skipping(depth=2, every=2, order=order, guided_every=2, guidance_end=end)
    ours, _ = check(tmp_path, name, skipping)
    notes = " ".join(rocm_sd.report(ours).approximations)
    assert "shallow" in notes
    assert "no guidance" in notes
    assert " guided" not in notes.partition("calls so far")[2], "none of its steps had guidance"


@pytest.mark.parametrize("scheduler", ["euler", "dpm++", "pndm", "ancestral"])
def test_schedulers(tmp_path, scheduler):
    check(tmp_path, "sd15", SETTINGS["both"], scheduler=scheduler)


@pytest.mark.parametrize(
    "options",
    [
        {"guidance_scale": 1.0},
        {"num_images_per_prompt": 3},
        {"height": 24, "width": 16},
        {"prompt": ["a frog", "a dog"]},
        {"num_inference_steps": 1},
    ],
    ids=str,
)
def test_calls_of_other_kinds(tmp_path, options):
    check(tmp_path, "sd15", SETTINGS["both"], seeds=(0, 1), **options)


def test_pictures_do_not_remember_each_other(tmp_path):
    """Other prompts, sizes and step counts in turn, and one picture that is given up in its middle."""
    pipe = rocm_sd.optimize(CASES["sd15"].build(tmp_path), quality=SETTINGS["both"])
    first = drawn(pipe, "sd15")
    for options in ({"height": 24}, {"num_inference_steps": 3}, {"prompt": "a dog"}, {"guidance_scale": 1.0}):
        drawn(pipe, "sd15", **options)
        assert torch.equal(drawn(pipe, "sd15"), first), options

    def stop(pipe, number, _timestep, tensors):
        if number == 2:
            raise KeyboardInterrupt
        return tensors

    with pytest.raises(KeyboardInterrupt):
        drawn(pipe, "sd15", seed=5, callback_on_step_end=stop)
    assert torch.equal(drawn(pipe, "sd15"), first)


def test_restore_brings_stocks_bits_back(tmp_path):
    pipe, stock = (CASES["sd15"].build(tmp_path) for _ in range(2))
    rocm_sd.optimize(pipe, quality=SETTINGS["both"])
    assert not torch.equal(drawn(pipe, "sd15"), drawn(stock, "sd15"))
    rocm_sd.restore(pipe)
    assert torch.equal(drawn(pipe, "sd15"), drawn(stock, "sd15"))


def test_exact_has_the_bits_that_it_had(tmp_path):
    plain, exact = (CASES["sd15"].build(tmp_path) for _ in range(2))
    rocm_sd.optimize(plain)
    rocm_sd.optimize(exact, quality=SETTINGS["both"])
    drawn(exact, "sd15")
    rocm_sd.optimize(exact, quality="exact")
    assert torch.equal(drawn(exact, "sd15"), drawn(plain, "sd15"))


def test_a_copy_is_exact(tmp_path):
    pipe = rocm_sd.optimize(CASES["sd15"].build(tmp_path), quality=SETTINGS["both"])
    copied = rocm_sd.restore(copy.deepcopy(pipe))
    assert torch.equal(drawn(copied, "sd15"), drawn(CASES["sd15"].build(tmp_path), "sd15"))


def test_two_threads_draw_right_pictures(tmp_path):
    """One of them is answered without approximation where the other is in a step: no picture mixes the two."""
    pipe = rocm_sd.optimize(CASES["sd15"].build(tmp_path), quality=SETTINGS["cached"])
    other = copy.copy(pipe)
    other.scheduler = scheduler_of("ddim")
    found = {}

    def draw(which, seed):
        found[seed] = drawn(which, "sd15", seed)

    threads = [threading.Thread(target=draw, args=each) for each in ((pipe, 1), (other, 2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(picture.isfinite().all() for picture in found.values())


def test_gradients_are_exact(tmp_path):
    plain, pipe = (CASES["sd15"].build(tmp_path) for _ in range(2))
    rocm_sd.optimize(plain)
    rocm_sd.optimize(pipe, quality=SETTINGS["both"])
    text = torch.randn(2, 7, pipe.unet.config.cross_attention_dim, generator=torch.Generator().manual_seed(0))

    def gradient(unet):
        x = torch.ones(2, 4, 8, 8, requires_grad=True)
        return torch.autograd.grad(unet(x, 500, text, return_dict=False)[0].sum(), x)[0]

    assert torch.equal(gradient(pipe.unet), gradient(plain.unet))


def test_what_cannot_be_approximated_says_so(tmp_path):
    pipe = CASES["sd15"].build(tmp_path)
    rocm_sd.optimize(pipe, quality=SETTINGS["both"])
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    drawn(pipe, "sd15")
    assert any("exact, because FreeU" in note for note in rocm_sd.report(pipe).notes)
    pipe.disable_freeu()
    rocm_sd.optimize(pipe.unet, quality=SETTINGS["both"])
    assert any("all is exact" in note for note in rocm_sd.report(pipe.unet).notes)
    rocm_sd.restore(pipe.unet)
    rocm_sd.optimize(pipe, quality="high")
    assert any("nothing was measured" in note for note in rocm_sd.report(pipe).approximations)
    assert rocm_sd.report(rocm_sd.optimize(pipe)).approximations == ()
    rocm_sd.optimize(pipe, "memory", SETTINGS["both"])
    assert any("one after the other" in note and "exact" in note for note in rocm_sd.report(pipe).notes)


def test_a_lora_is_in_both_kinds_of_steps(tmp_path):
    pipe = rocm_sd.optimize(CASES["sd15"].build(tmp_path), quality=SETTINGS["cached"])
    before = drawn(pipe, "sd15")
    for name, weight in pipe.unet.named_parameters():
        if "to_k" in name:
            weight.data *= 1.5
    assert not torch.equal(drawn(pipe, "sd15"), before)
