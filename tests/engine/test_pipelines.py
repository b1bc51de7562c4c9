"""Every pipeline that `optimize` knows gives stock's latents: measured against a run in float64, in every test run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import rocm_sd
from pipelines import (
    CASES,
    KNOWN_SCHEDULERS,
    TEXT,
    UNKNOWN_SCHEDULERS,
    call,
    embeddings_of,
    exactly,
    mask_of,
    picture_of,
    require_as_exact_as_stock,
    scheduler_of,
    small_blocks_too,
)

SEEDS = (0, 1, 2, 3, 4)
GRID = ("ddim", "euler", "dpm++")
IMAGES = ("image", "control_image")


@pytest.fixture(autouse=True, params=["0", "1"], ids=["stepwise", "captured"])
def step_graph(request, monkeypatch):
    small_blocks_too(monkeypatch, request.param)
    return request.param


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Stock's latents and the exact ones, made once for both settings of `step_graph`: they do not depend on it."""
    folder, known = tmp_path_factory.mktemp("tokenizer"), {}

    def of(name, seeds, dtype=torch.float32, scheduler=None, **options):
        key = (name, seeds, dtype, scheduler, *options.items())
        if key not in known:
            stock, exact = (pipeline(name, folder, kind, scheduler) for kind in (dtype, torch.float64))
            with exactly(dtype):
                truth = [call(exact, CASES[name], seed, **options) for seed in seeds]
            known[key] = truth, [call(stock, CASES[name], seed, **options) for seed in seeds]
        return known[key]

    return of


def pipeline(name, folder, dtype=torch.float32, scheduler=None):
    pipe = CASES[name].build(folder)
    if scheduler is not None:
        pipe.scheduler = scheduler_of(scheduler, **CASES[name].scheduler_options)
    return pipe.to(dtype)


def check(references, folder, name, seeds, dtype=torch.float32, scheduler=None, **options):
    exact, stock = references(name, seeds, dtype, scheduler, **options)
    pipe = rocm_sd.optimize(pipeline(name, folder, dtype, scheduler))
    ours = [call(pipe, CASES[name], seed, **options) for seed in seeds]
    require_as_exact_as_stock(ours, exact, stock)
    return pipe


@pytest.mark.parametrize("name", CASES)
def test_every_pipeline_gives_stocks_latents(references, tmp_path, step_graph, name):
    pipe = check(references, tmp_path, name, SEEDS[:2])
    report = rocm_sd.report(pipe)
    assert report.replaced
    kind = type(pipe.unet if hasattr(pipe, "unet") else pipe.transformer).__name__
    captured = [note for note in report.notes if note.startswith(kind) and "of its forward" in note]
    assert bool(captured) == (step_graph == "1"), report.notes


@pytest.mark.parametrize("scheduler", GRID)
@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_five_seeds_and_three_schedulers(references, tmp_path, name, scheduler):
    check(references, tmp_path, name, SEEDS, scheduler=scheduler)


@pytest.mark.parametrize("scheduler", GRID)
@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_five_seeds_and_three_schedulers_in_half_precision(references, tmp_path, name, scheduler):
    check(references, tmp_path, name, SEEDS, torch.float16, scheduler)


@pytest.mark.parametrize("name", ["sd15-inpaint9", "sd15-controlnet", "refiner", "lcm", "turbo", "sd3", "flux-dev"])
def test_other_pipelines_in_half_precision(references, tmp_path, name):
    check(references, tmp_path, name, SEEDS[:3], torch.bfloat16)


@pytest.mark.parametrize("scheduler", [*KNOWN_SCHEDULERS, *UNKNOWN_SCHEDULERS])
def test_every_scheduler(references, tmp_path, scheduler):
    check(references, tmp_path, "sd15", SEEDS[:2], scheduler=scheduler, num_inference_steps=5)


@pytest.mark.parametrize("scheduler", [*KNOWN_SCHEDULERS, *UNKNOWN_SCHEDULERS])
def test_every_scheduler_from_a_picture(references, tmp_path, scheduler):
    check(references, tmp_path, "sdxl-img2img", SEEDS[:2], scheduler=scheduler)


@pytest.mark.parametrize(
    "options",
    [
        {"guidance_scale": 1.0},
        {"guidance_rescale": 0.7},
        {"num_images_per_prompt": 3},
        {"eta": 0.6},
        {"negative_prompt": "a dog"},
        {"timesteps": [901, 501, 42]},
        {"num_inference_steps": 1},
    ],
    ids=",".join,
)
@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_options_of_a_call(references, tmp_path, name, options):
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    scheduler = "dpm++" if "timesteps" in options else None
    check(references, tmp_path, name, SEEDS[:2], scheduler=scheduler, **given)


def test_a_picture_begun_by_the_base_model_is_ended_by_the_refiner(references, tmp_path):
    check(references, tmp_path, "sdxl", SEEDS[:3], denoising_end=0.6)
    check(references, tmp_path, "refiner", SEEDS[:3], denoising_start=0.5, num_inference_steps=6)


@pytest.mark.parametrize("name", CASES)
def test_what_goes_in_is_seen_in_what_comes_out(tmp_path, name):
    """A stale text, picture or mask would show, and so would a prompt that no part of the model listens to."""
    case = CASES[name]
    pipe = rocm_sd.optimize(pipeline(name, tmp_path))
    given, first = case.arguments, call(pipe, case)
    others = [{"prompt": "a cat"}] if "prompt" in given else [{"prompt_embeds": embeddings_of(9, 1, 12, TEXT)}]
    for key in [key for key in IMAGES if key in given]:
        several = isinstance(given[key], list)
        others.append({key: [picture_of(8)] * len(given[key]) if several else picture_of(8)})
    if "mask_image" in given:
        others.append({"mask_image": mask_of().flip(3)})
    for other in others:
        differs = float((call(pipe, case, **other) - first).norm() / first.norm())
        assert differs > 1e-3, f"{list(other)} makes a difference of {differs:.1e}"
    assert torch.equal(call(pipe, case), first)


@pytest.mark.parametrize("name", CASES)
def test_the_decoded_picture_is_stocks_and_so_is_every_bit_after_restore(tmp_path, name):
    case, options = CASES[name], {"output_type": "np", "num_inference_steps": 2}
    pipe = pipeline(name, tmp_path)
    stock = call(pipe, case, **options)
    modules = {key: part for key, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    weights = {
        key: {path: weight.clone() for path, weight in part.state_dict().items()} for key, part in modules.items()
    }
    scheduler, own = pipe.scheduler, {key: set(vars(part)) for key, part in modules.items()}
    ours = call(rocm_sd.optimize(pipe), case, **options)
    assert ours.shape == stock.shape
    assert ours.dtype == stock.dtype
    # A level of 8 bits is 4e-3.
    assert np.abs(ours - stock).max() < 4e-4
    assert stock.std() > 0.01
    rocm_sd.restore(pipe)
    assert np.array_equal(call(pipe, case, **options), stock)
    assert pipe.scheduler is scheduler
    for key, part in modules.items():
        assert set(vars(part)) == own[key]
        for path, weight in part.state_dict().items():
            assert weight.stride() == weights[key][path].stride()
            assert torch.equal(weight, weights[key][path])


@pytest.mark.parametrize("name", ["sd15", "sdxl", "sd3", "flux-dev"])
def test_a_bare_model_gives_answers_that_stay(tmp_path, name):
    """Nothing is known of what the caller does with them, nor of the timesteps to come."""
    pipe = pipeline(name, tmp_path)
    part = pipe.unet if hasattr(pipe, "unet") else pipe.transformer
    asked = []
    handle = part.register_forward_pre_hook(lambda _, args, named: asked.append((args, named)), with_kwargs=True)
    call(pipe, CASES[name])
    handle.remove()
    with torch.no_grad():
        stock = [part(*args, **named)[0] for args, named in asked]
        rocm_sd.optimize(part)
        for order in (asked, asked[::-1], asked):
            ours = [part(*args, **named)[0] for args, named in order]
            ours = ours if order is asked else ours[::-1]
            for mine, theirs in zip(ours, stock, strict=True):
                assert float((mine - theirs).norm() / theirs.norm()) < 1e-5
    rocm_sd.restore(part)
    with torch.no_grad():
        assert torch.equal(part(*asked[0][0], **asked[0][1])[0], stock[0])
