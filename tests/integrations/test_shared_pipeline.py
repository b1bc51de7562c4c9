"""One pipeline for many at once: every picture is as near to float64 as stock's own, whoever else is drawn."""

from __future__ import annotations

import threading
import time
from random import Random
from types import MappingProxyType

import numpy as np
import pytest
import torch
from diffusers import AutoPipelineForImage2Image, AutoPipelineForInpainting
from PIL import Image
from safetensors.torch import save_file

import rocm_sd
from pipelines import CASES, exactly, small_blocks_too
from rocm_sd.engine.approximation import Approximation, Skipping, remember
from rocm_sd.engine.batching import LADDER, StepBatcher
from rocm_sd.errors import InvalidOption, Unsupported
from rocm_sd.integrations.diffusers import SCHEDULERS, Drawing, SharedPipeline, set_scheduler
from tiny_models import lora_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, params=["0", "1"], ids=["stepwise", "captured"])
def step_graph(request, monkeypatch, tmp_path):
    small_blocks_too(monkeypatch, request.param)
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "cache"))
    return request.param


@pytest.fixture
def shared(tmp_path, step_graph):
    """(pipeline that is shared, what was run at once)."""
    made = []

    def make(name="sd15", measured=MappingProxyType({}), **options):
        batches = []
        ladder = LADDER if step_graph == "1" else ()
        batcher = StepBatcher(CPU, most=12, ladder=ladder, on_batch=batches.append)
        pipe = CASES[name].build(tmp_path)
        for quality, approximation in measured.items():
            remember(pipe.unet, quality, 6, approximation, "for the test", {})
        one = SharedPipeline(rocm_sd.optimize(pipe), batcher, **options)
        made.append((one, batcher, pipe))
        return one, batches

    yield make
    for one, batcher, pipe in made:
        batcher.close()
        one.close()
        rocm_sd.restore(pipe)


def picture(seed, side=16):
    pixels = np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def mask(side=16):
    made = Image.new("L", (side, side), 0)
    made.paste(255, (side // 2, 0, side, side))
    return made


def drawings(count, seed=0):
    """Of every kind: prompts, steps, guidance and none, sizes, schedulers, images and masks."""
    random = Random(seed)
    found = []
    for number in range(count):
        task = random.choice(("text", "text", "text", "image", "inpaint"))
        side = random.choice((16, 24))
        size = {"width": side, "height": random.choice((16, 24))}
        given = size if task == "text" else {"image": picture(number, side)}
        given |= {"mask": mask(side)} if task == "inpaint" else {}
        given |= {"scheduler": random.choice((None, *sorted(set(SCHEDULERS) - {"lcm"}))), "seed": random.randint(0, 99)}
        given |= {"negative": random.choice(("", "blue")), "strength": random.choice((0.6, 1.0))}
        steps, guidance = random.randint(2, 5), random.choice((1.0, 3.0, 7.5))
        found.append(Drawing(f"a {number % 3}", steps=steps, guidance=guidance, **given))
    return found


def at_once(shared, several, pause=0.0, **options):
    found = {}

    def go(number, drawing):
        time.sleep(pause * number)
        try:
            found[number] = shared.draw(drawing, **options)
        except Exception as error:  # noqa: BLE001 -- it is looked at
            found[number] = error

    threads = [threading.Thread(target=go, args=given) for given in enumerate(several)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return [found[number] for number in range(len(several))]


def alone(pipe, drawing):
    """By Diffusers' own pipeline, from the text itself."""
    if drawing.image is not None:
        kind = AutoPipelineForImage2Image if drawing.mask is None else AutoPipelineForInpainting
        pipe = kind.from_pipe(pipe)
        pipe.set_progress_bar_config(disable=True)
    before = pipe.scheduler
    if drawing.scheduler is not None:
        set_scheduler(pipe, drawing.scheduler)
    size = {"width": drawing.width, "height": drawing.height}
    if drawing.image is not None:
        given = {"image": drawing.image, "strength": drawing.strength}
        sides = {"width": drawing.image.width, "height": drawing.image.height}
        size = given if drawing.mask is None else {**given, "mask_image": drawing.mask, **sides}
    made = pipe(
        drawing.prompt, negative_prompt=drawing.negative, num_inference_steps=drawing.steps,
        guidance_scale=drawing.guidance, generator=torch.Generator().manual_seed(drawing.seed), **size,
    ).images[0]  # fmt: skip
    pipe.scheduler = before
    return made


def require_exact(tmp_path, name, several, pictures):
    """The largest error of each is at most twice stock's, and a rounding of its pixels."""
    stock, exact = (CASES[name].build(tmp_path).to(dtype) for dtype in (torch.float32, torch.float64))
    for drawing, ours in zip(several, pictures, strict=True):
        assert not isinstance(ours, Exception), (drawing, ours)
        theirs = np.asarray(alone(stock, drawing)).astype(int)
        with exactly(torch.float32):
            right = np.asarray(alone(exact, drawing)).astype(int)
        allowed = 2 * abs(theirs - right).max() + 1
        assert abs(np.asarray(ours).astype(int) - right).max() <= allowed, drawing


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_pictures_of_every_kind_are_what_they_are_alone(shared, tmp_path, name):
    one, batches = shared(name)
    several = drawings(14)
    pictures = at_once(one, several)
    require_exact(tmp_path, name, several, pictures)
    assert max(batch.pictures for batch in batches) > 2, "some were drawn together"
    assert len(batches) < sum(batch.pictures for batch in batches)


def test_the_same_request_gives_the_same_picture_whatever_comes_beside_it(shared):
    one, _ = shared()
    first = Drawing("a frog", steps=4, guidance=3.0, seed=5, width=16, height=16)
    lonely = np.asarray(one.draw(first)).astype(int)
    for seed in range(3):
        crowd = [first, *(each for each in drawings(6, seed) if each.image is None)]
        assert abs(np.asarray(at_once(one, crowd, pause=0.002)[0]).astype(int) - lonely).max() <= 1


def test_texts_are_encoded_together_and_kept(shared, monkeypatch):
    one, _ = shared()
    encoded = []
    own = type(one.pipe).encode_prompt

    def encode(pipe, prompt=None, *args, **kwargs):
        encoded.extend(prompt if isinstance(prompt, list) else [])
        return own(pipe, prompt, *args, **kwargs)

    monkeypatch.setattr(type(one.pipe), "encode_prompt", encode)
    several = [Drawing(f"a {i % 2}", "blue", 2, 3.0, i, width=16, height=16) for i in range(6)]
    at_once(one, several)
    assert sorted(encoded) == ["a 0", "a 1", "blue"]


def test_steps_are_told_and_a_preview_can_be_had(shared):
    one, _ = shared()
    seen = []

    def on_step(step, preview):
        seen.append((step, preview().size if step == 2 else None))

    one.draw(Drawing("a frog", steps=4, width=16, height=16), on_step)
    assert [step for step, _ in seen] == [1, 2, 3, 4]
    assert seen[1][1] is not None


def test_one_that_is_stopped_ends_at_its_next_step(shared):
    one, _ = shared()
    steps, stopped = [], []

    def on_step(step, _preview):
        steps.append(step)
        if step == 2:
            stopped.append(KeyError("stop"))

    with pytest.raises(KeyError):
        one.draw(Drawing("a frog", steps=6, width=16, height=16), on_step, lambda: stopped[0] if stopped else None)
    assert steps == [1, 2]
    one.draw(Drawing("a frog", steps=2, width=16, height=16))


def test_what_fails_fails_alone(shared):
    one, _ = shared()
    good = Drawing("a frog", steps=3, width=16, height=16)
    found = at_once(one, [good, Drawing("a frog", steps=2000, width=16, height=16), good])
    assert isinstance(found[1], Unsupported)
    assert np.array_equal(found[0], found[2]) or abs(np.asarray(found[0], int) - np.asarray(found[2], int)).max() <= 1


def test_a_quality_leaves_steps_out_one_picture_at_a_time_beside_exact_ones(shared, tmp_path, step_graph):
    setting = Skipping(depth=1, every=2)
    one, _ = shared(measured={"high": Approximation(setting)}, qualities=("exact", "high", "balanced"))
    assert one.why_not("high") is None
    with pytest.raises(Unsupported, match="nothing was measured"):
        one.draw(Drawing("a frog", steps=6, quality="balanced", width=16, height=16))
    rough = [Drawing("a frog", steps=6, guidance=3.0, seed=i, quality="high", width=16, height=16) for i in range(3)]
    exact = [Drawing("a frog", steps=6, guidance=3.0, seed=i, width=16, height=16) for i in range(3)]
    found = at_once(one, [*rough, *exact])
    require_exact(tmp_path, "sd15", exact, found[3:])
    by_itself = rocm_sd.optimize(CASES["sd15"].build(tmp_path), quality=setting)
    for drawing, ours in zip(rough, found[:3], strict=True):
        wanted = np.asarray(alone(by_itself, drawing)).astype(int)
        assert abs(np.asarray(ours).astype(int) - wanted).max() <= 1
    assert any("calls so far" in note and "shallow" in note for note in one.approximations("high"))


def test_one_that_waits_for_its_turn_in_a_quality_can_be_stopped(shared):
    one, _ = shared(measured={"high": Approximation(Skipping(depth=1, every=2))}, qualities=("exact", "high"))
    drawing = Drawing("a frog", steps=6, quality="high", width=16, height=16)
    with one._one_at_a_time["high"], pytest.raises(KeyError):
        one.draw(drawing, stop=lambda: KeyError("stop"))
    one.draw(drawing)


def test_a_quality_that_changes_weights_is_refused(shared):
    one, _ = shared(measured={"high": Approximation(eight_bits="int8")}, qualities=("high",))
    assert "eight_bits" in one.why_not("high")


def test_pictures_with_other_loras_are_drawn_apart(shared, tmp_path, step_graph):
    weights = CASES["sd15"].build(tmp_path)
    files = {}
    for seed, name in enumerate(("one", "other"), 1):
        files[name] = tmp_path / f"{name}.safetensors"
        save_file(lora_of(weights.unet, "unet", ("attn2.to_k", "attn2.to_v", "to_q"), seed=seed), files[name])
    one, batches = shared(loras={name: str(file) for name, file in files.items()})
    sets = ((), (("one", 1.0),), (("other", 0.5),), (("one", 0.5), ("other", 1.0)))
    several = [
        Drawing("a frog", steps=3, guidance=3.0, seed=i % 2, width=16, height=16, loras=sets[i // 2]) for i in range(8)
    ]
    found = at_once(one, several)
    stock = CASES["sd15"].build(tmp_path)
    for name, file in files.items():
        stock.load_lora_weights(str(file), adapter_name=name)
    for drawing, ours in zip(several, found, strict=True):
        assert not isinstance(ours, Exception), ours
        if drawing.loras:
            stock.enable_lora()
            stock.set_adapters([name for name, _ in drawing.loras], [weight for _, weight in drawing.loras])
        else:
            stock.disable_lora()
        wanted = np.asarray(alone(stock, drawing)).astype(int)
        assert abs(np.asarray(ours).astype(int) - wanted).max() <= 1, drawing.loras
    assert any(batch.pictures == 2 for batch in batches)
    with pytest.raises(InvalidOption, match="nosuch"):
        one.draw(Drawing("a frog", steps=2, loras=(("nosuch", 1.0),)))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"batch": 2}, "it is of one"),
        ({"strength": 0.0}, "more than 0"),
        ({"mask": mask()}, "without an image"),
        ({"quality": "high", "loras": (("one", 1.0),)}, "does not support LoRAs"),
        ({"image": picture(0), "steps": 1, "strength": 0.5}, "that is none"),
        ({"scheduler": "magic"}, "magic"),
        ({"width": 9}, "multiple of 8"),
    ],
)
def test_what_cannot_be_drawn_is_said_at_once(change, why):
    with pytest.raises((InvalidOption, Unsupported), match=why):
        Drawing("a frog", **change)


def test_transformers_are_not_shared(tmp_path):
    batcher = StepBatcher(CPU)
    with pytest.raises(Unsupported, match="StableDiffusion3Pipeline"):
        SharedPipeline(CASES["sd3"].build(tmp_path), batcher)
    batcher.close()
