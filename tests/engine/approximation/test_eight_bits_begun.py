"""How 8 bits begin: nothing is left of a beginning that fails, and a running picture does not notice one."""

from __future__ import annotations

import pytest
import torch

import rocm_sd
from pipelines import CASES, call
from rocm_sd.engine import optimization
from rocm_sd.engine.approximation import Approximation, eight_bits, observing
from rocm_sd.engine.calibration import described_call
from rocm_sd.rewrite.eight_bits import EightBitLayer

INT8 = Approximation(eight_bits="int8")


@pytest.fixture(autouse=True)
def small_layers_too(monkeypatch):
    monkeypatch.setattr(eight_bits, "_SMALLEST", 4)


def drawn(pipe, name="sd15", seed=0, **options):
    return call(pipe, CASES[name], seed, **{"num_inference_steps": 3, **options})


def denoiser(pipe):
    return getattr(pipe, "unet", None) or pipe.transformer


def standing(model):
    return [name for name, layer in model.named_modules() if isinstance(layer, EightBitLayer)]


def fails(*_given, **_named):
    raise KeyboardInterrupt


def after(count, own):
    """What fails at a later call than so many."""
    calls = []

    def answer(*args, **named):
        calls.append(args)
        if len(calls) > count:
            raise KeyboardInterrupt
        return own(*args, **named)

    return answer


@pytest.mark.parametrize(
    "broken",
    [
        lambda patch: patch.setattr(eight_bits, "_put", after(3, eight_bits._put)),
        lambda patch: patch.setattr(eight_bits, "_in_eight_bits", after(5, eight_bits._in_eight_bits)),
        lambda patch: patch.setattr(eight_bits, "install", after(1, eight_bits.install)),
        lambda patch: patch.setattr(optimization, "way_of", fails),
        lambda patch: patch.setattr(optimization, "apply", after(1, optimization.apply)),
        lambda patch: patch.setattr(optimization.levels, "install", fails),
        lambda patch: patch.setattr(optimization, "facts_of", fails),
    ],
    ids=["a layer", "a group", "the decoder", "a way", "a rule", "the level", "the last line"],
)
def test_an_optimize_that_fails_leaves_the_pipeline_as_it_was(tmp_path, broken):
    pipe = CASES["sd15"].build(tmp_path)
    right, modules = drawn(pipe, output_type="pt"), dict(pipe.unet.named_modules())
    with pytest.MonkeyPatch.context() as patch:
        broken(patch)
        with pytest.raises(KeyboardInterrupt):
            rocm_sd.optimize(pipe, quality=Approximation(eight_bits="int8", eight_bit_decoder="int8"))
    assert not [*standing(pipe.unet), *standing(pipe.vae)]
    assert dict(pipe.unet.named_modules()) == modules
    assert not [part for part in pipe.unet.modules() if "forward" in vars(part)]
    assert torch.equal(drawn(rocm_sd.restore(pipe), output_type="pt"), right)


@pytest.mark.parametrize("name", ["sd15", "sdxl", "sd3", "flux-dev"])
def test_a_running_picture_is_the_same_where_a_model_is_tried_on_others_meanwhile(tmp_path, name):
    """In SD3 and Flux the schedule has a length of its own, and the steps are counted by the scheduler."""
    pipe = CASES[name].build(tmp_path)
    right = drawn(pipe, name, num_inference_steps=7)
    layers = {each: layer for group in eight_bits.groups(denoiser(pipe)) for each, layer in group.named()}

    def look(pipe, number, _timestep, tensors):
        if number == 3:
            observing.observe(pipe, layers)
        return tensors

    assert torch.equal(drawn(pipe, name, num_inference_steps=7, callback_on_step_end=look), right)


def test_timesteps_of_ones_own_are_kept(tmp_path):
    pipe = CASES["sd15"].build(tmp_path)
    pipe.scheduler.set_timesteps(5)
    pipe.scheduler.timesteps = torch.tensor([900, 500, 100])
    rocm_sd.optimize(pipe, quality=INT8)
    assert standing(pipe.unet)
    assert pipe.scheduler.timesteps.tolist() == [900, 500, 100]


def test_a_model_that_is_optimised_anew_within_a_picture_is_not_tried_again(tmp_path, monkeypatch):
    pipe = CASES["sd15"].build(tmp_path)
    heard, pictures, own = [], [], observing._draw
    monkeypatch.setattr(observing, "_draw", lambda *given: pictures.append(given) or own(*given))
    monkeypatch.setattr(optimization.calibration, "counts", lambda _device: True)
    monkeypatch.setattr(optimization.calibration, "wanted", lambda *_, **__: False)
    monkeypatch.setattr(
        optimization.calibration, "install",
        lambda _models, _device, first_call: heard.append(first_call) or optimization.Installed(tuple, lambda: None),
    )  # fmt: skip
    rocm_sd.optimize(pipe, quality=INT8)
    before = {name: pipe.unet.get_submodule(name).x_scale for name in standing(pipe.unet)}
    right = drawn(pipe)
    monkeypatch.setattr(optimization, "standing", lambda *_, **__: "another")
    args = torch.zeros(2, 4, 8, 8), torch.tensor(1)
    assert heard[-1](pipe.unet, described_call(args, {}), args, {})
    assert len(heard) == 2, "it was optimised anew"
    assert len(pictures) == 1
    assert {name: pipe.unet.get_submodule(name).x_scale for name in standing(pipe.unet)} == before
    assert torch.equal(drawn(pipe), right)
    rocm_sd.optimize(pipe, quality=INT8)
    assert len(pictures) == 2, "its weights may be others by now"


@pytest.mark.parametrize(
    "name", ["sd15-img2img", "sd15-inpaint4", "sd15-inpaint9", "sd15-controlnet", "sdxl-img2img", "sdxl-controlnet"]
)
def test_pipelines_that_begin_with_a_picture(tmp_path, name):
    pipe = CASES[name].build(tmp_path)
    right = drawn(pipe, name, num_inference_steps=4)
    rocm_sd.optimize(pipe, quality=INT8)
    assert standing(pipe.unet), rocm_sd.report(pipe).approximations
    assert any("layers multiply in int8" in note for note in rocm_sd.report(pipe).approximations)
    ours = drawn(pipe, name, num_inference_steps=4)
    assert 0 < (ours - right).square().mean().sqrt() / right.std() < 0.3
    if "controlnet" in name:
        assert not standing(pipe.controlnet)
    assert torch.equal(drawn(rocm_sd.restore(pipe), name, num_inference_steps=4), right)
