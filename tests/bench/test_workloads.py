from __future__ import annotations

import pytest
import torch

from rocm_sd.bench import architectures
from rocm_sd.bench.workloads import WORKLOADS, make
from rocm_sd.errors import DeviceUnavailable, InvalidOption, Unsupported
from rocm_sd.integrations.diffusers import batch_memory
from rocm_sd.integrations.diffusers.batch_memory import TooLargeBatch
from rocm_sd.models.emoji import MODEL_FOLDER

CPU = torch.device("cpu")
META = torch.device("meta")


@pytest.fixture(scope="module")
def tiny():
    return make("sd15-512", CPU, tiny=True)


def test_the_workloads_are_those_of_the_documents():
    assert set(WORKLOADS) == {"sd15-512", "sd15-768", "sd21-768", "sdxl-1024", "sdxl-mlperf", "emoji"}
    mlperf = WORKLOADS["sdxl-mlperf"]
    assert (mlperf.steps, mlperf.scheduler, mlperf.guidance, mlperf.shared_noise) == (20, "euler", 8.0, True)


@pytest.mark.parametrize(
    ("family", "parameters"), [("sd15", 859_520_964), ("sd21", 865_910_724), ("sdxl", 2_567_463_684)]
)
def test_the_architectures_are_the_real_ones(family, parameters):
    # The counts of the published checkpoints.
    pipe = architectures.random_pipeline(family, "ddim", "epsilon", META, torch.float16)
    assert sum(p.numel() for p in pipe.unet.parameters()) == parameters
    assert sum(p.numel() for p in pipe.vae.parameters()) == 83_653_863


def test_the_arithmetic_of_a_picture_is_that_of_the_baselines():
    # 1.607 TFLOP a step of SD 1.5 with guidance, 2.515 for its VAE.
    pipe = architectures.random_pipeline("sd15", "ddim", "epsilon", META, torch.float16)
    assert architectures.picture_flops(pipe, 512, 512, 50, guided=True) == pytest.approx(82.87e12, rel=2e-3)


def test_every_pipeline_has_the_same_weights_in_modules_of_its_own(tiny):
    first, second = tiny.pipeline(), tiny.pipeline()
    assert first.unet is not second.unet
    assert first.scheduler is not second.scheduler
    weight = first.unet.conv_in.weight
    assert torch.equal(weight, second.unet.conv_in.weight)
    weight.zero_()
    assert second.unet.conv_in.weight.abs().sum() > 0
    again = make("sd15-512", CPU, tiny=True).pipeline()
    assert torch.equal(second.unet.conv_in.weight, again.unet.conv_in.weight)


def test_making_a_workload_leaves_the_random_numbers_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    make("sd15-512", CPU, tiny=True)
    assert torch.equal(torch.rand(1), expected)
    assert torch.get_default_dtype() is torch.float32


def test_a_picture_is_the_same_every_time_and_depends_on_the_seed(tiny):
    pipe = tiny.pipeline()
    first = tiny.picture(pipe, 2, output="latent")
    assert first.shape == (2, 4, 8, 8)
    assert torch.equal(first, tiny.picture(pipe, 2, output="latent"))
    assert not torch.equal(first, tiny.picture(pipe, 2, seed=1, output="latent"))
    assert not torch.equal(first[0], first[1])
    assert tiny.picture(pipe, 1).shape == (1, 3, 64, 64)


def test_every_dtype_starts_from_the_same_noise(tiny):
    single = tiny.picture(tiny.pipeline(), 1, output="latent")
    double = tiny.picture(tiny.pipeline(torch.float64), 1, output="latent")
    assert double.dtype is torch.float64
    assert (single - double).norm() < 1e-4 * double.norm()


def test_mlperf_pictures_share_their_noise():
    work = make("sdxl-mlperf", CPU, tiny=True)
    noise = work._noise(2, 0)
    assert torch.equal(noise[0], noise[1])
    assert work.picture(work.pipeline(), 2).shape == (2, 3, 64, 64)
    assert work.facts.scheduler == "EulerDiscreteScheduler"


def test_sd21_predicts_v():
    assert make("sd21-768", CPU, tiny=True).pipeline().scheduler.config.prediction_type == "v_prediction"


def test_facts_say_what_it_is(tiny):
    facts = tiny.facts
    # A tiny model must never pass for the real one in a table of baselines.
    assert (facts.name, facts.model, facts.weights) == ("sd15-512-tiny", "sd15, tiny", "random")
    assert (facts.dtype, facts.scheduler, facts.guidance) == ("float32", "DDIMScheduler", 7.5)
    assert facts.flops
    assert facts.flops > 0
    assert make("sd15-512", CPU, tiny=True, steps=9).facts.steps == 9


def test_the_emoji_model_has_its_own_weights_and_few_steps_on_a_cpu():
    work = make("emoji", CPU)
    assert (work.facts.weights, work.facts.steps, work.facts.height) == ("emoji-sd", 4, 128)
    assert work.pipeline().text_encoder is not None


def test_a_model_of_a_folder_is_named_by_its_last_part():
    # Small enough for a CPU, unlike what the workload is made for.
    work = make("sd15-512", CPU, model=str(MODEL_FOLDER), steps=2)
    assert (work.facts.weights, work.facts.model) == (MODEL_FOLDER.name, "sd15")
    assert str(MODEL_FOLDER.parent) not in str(work.facts)
    assert set(work._text(2, torch.float32)) == {"prompt", "negative_prompt"}


def test_a_big_model_on_a_cpu_is_refused_with_what_to_type():
    with pytest.raises(DeviceUnavailable) as refused:
        make("sd15-512", CPU)
    assert "rocm-sd bench sd15-512 --tiny" in str(refused.value)
    assert "rocm-sd bench emoji" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("sd99", {}, InvalidOption),
        ("emoji", {"model": "x/y"}, InvalidOption),
        ("sd15-512", {"model": "x/y", "tiny": True}, InvalidOption),
        ("emoji", {"steps": 0}, InvalidOption),
    ],
)
def test_what_does_not_fit_is_said(name, options, error):
    with pytest.raises(error):
        make(name, CPU, **options)


def test_a_model_of_another_family_is_refused():
    from rocm_sd.bench.workloads import _loaded
    from rocm_sd.models import resolve

    with pytest.raises(Unsupported) as refused:
        _loaded(resolve(), WORKLOADS["sdxl-1024"], torch.float32)
    assert "Use one of: sd15-512, sd15-768, sd21-768, emoji." in str(refused.value)


def test_a_batch_that_cannot_fit_is_refused_before_its_first_tensor_is_made(tiny, monkeypatch):
    pipe = tiny.pipeline()

    def drawn(*_given):
        raise AssertionError("the noise was drawn")

    monkeypatch.setattr(tiny, "_noise", drawn)
    with pytest.raises(
        TooLargeBatch, match=r"A batch of 99999999 with pictures of 64x64 takes \d+ GB .* and there are"
    ):
        tiny.picture(pipe, 99_999_999)


def test_what_a_batch_takes_at_least_grows_with_it_and_is_less_than_what_is_refused(monkeypatch):
    pipe = architectures.random_pipeline("sd15", "ddim", "epsilon", META, torch.float16)
    # 320 at 64x64, two layers and a smaller copy of each width but the last: what the way up is given.
    widths, sides = (320, 640, 1280, 1280), (64, 32, 16, 8)
    skips = 320 * 64 * 64 + sum(2 * width * side**2 for width, side in zip(widths, sides, strict=True))
    skips += sum(width * side**2 for width, side in zip(widths, sides[1:], strict=False))
    least = 8 * 2 * skips + 4 * 4 * 64 * 64
    for free, fits in ((10 * least, 10), (10 * least - 1, 9)):
        monkeypatch.setattr(batch_memory, "free_memory", lambda _device, free=free: free)
        batch_memory.require_memory(pipe, fits, 512, 512, CPU, torch.float16)
        with pytest.raises(TooLargeBatch, match=f"Try a batch of {fits} or fewer"):
            batch_memory.require_memory(pipe, fits + 1, 512, 512, CPU, torch.float16)
    # A system that does not tell refuses nothing.
    monkeypatch.setattr(batch_memory, "free_memory", lambda _device: None)
    batch_memory.require_memory(pipe, 99_999_999, 512, 512, CPU, torch.float16)
