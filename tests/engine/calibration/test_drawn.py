"""What was drawn with is noted as shapes, and made again from them."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

import rocm_sd
from pipelines import tiny_pipeline
from rocm_sd.bench import tracing
from rocm_sd.engine import calibration
from rocm_sd.engine.calibration import drawn
from rocm_sd.integrations.diffusers.rebuilding import drawn_models
from rocm_sd.tuning.choice import was_timed

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ROCM_SD_CALIBRATE", "1")
    return tmp_path / "cache" / "drawn"


@pytest.fixture
def pipe(tmp_path, monkeypatch):
    """One whose calls are noted and not measured, as on a card whose data are shipped."""
    monkeypatch.setattr(calibration, "wanted", lambda _device, **_named: False)
    return rocm_sd.optimize(partial(tiny_pipeline, tmp_path)())


def picture(pipe, count=1):
    latents = torch.randn(count, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    return pipe(["a cat"] * count, num_inference_steps=2, latents=latents, output_type="pt").images


def test_each_kind_of_call_is_noted_once(pipe, cache):
    for count in (1, 1, 2):
        picture(pipe, count)
    found = calibration.noted()
    calls = sorted((call.model, call.part, call.args[0]["shape"][0], call.times) for call in found)
    assert calls == [
        ("AutoencoderKL", "decoder", 1, 1),
        ("AutoencoderKL", "decoder", 2, 1),
        ("UNet2DConditionModel", "", 2, 20),
        ("UNet2DConditionModel", "", 4, 20),
    ]
    assert [call.when for call in found] == sorted((call.when for call in found), reverse=True)
    assert "a cat" not in "".join(path.read_text() for path in cache.iterdir())


def test_it_is_made_again_with_the_same_problems(pipe):
    picture(pipe)
    again = {type(each.model).__name__: each for each in drawn_models(CPU)}
    assert again.keys() == {"UNet2DConditionModel", "Decoder"}
    unet = again["UNet2DConditionModel"]
    assert unet.key == calibration.model_key(pipe.unet)
    assert unet.times > again["Decoder"].times == 1
    assert torch.isfinite(unet.model(*unet.args, **unet.kwargs)[0]).all()
    found = tracing.trace_models(drawn_models(CPU))
    assert {(each.key, each.call) for each in found.models} == {(each.key, each.call) for each in again.values()}
    seen = {each.call.op for each in found.problems}
    assert {"attention", "group_norm_silu", "memory_format", "convolution_library"} <= seen
    # The UNet alone decides on a setting of the whole pipeline.
    assert len([each for each in found.problems if each.call.op == "memory_format"]) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"model": "torch"},
        {"model": "NoSuchModel"},
        {"model": "AutoencoderKL"},
        {"config": {"block_out_channels": "wide"}},
        {"part": "__class__"},
        {"part": "nowhere"},
    ],
    ids=str,
)
def test_what_cannot_be_made_is_passed_over(pipe, cache, caplog, change):
    picture(pipe)
    for path in cache.iterdir():
        held = json.loads(path.read_text())
        path.write_text(json.dumps(held | change if held["model"] == "UNet2DConditionModel" else held))
    assert "UNet2DConditionModel" not in {type(each.model).__name__ for each in drawn_models(CPU)}
    assert "is not tuned" in caplog.text


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "null", '{"model": 3}', "[" * 100_000, '{"times": NaN}', "\udcff"],
    ids=["empty", "list", "no-field", "null", "number", "deep", "nan", "bytes"],
)
def test_a_file_that_is_none_is_passed_over(pipe, cache, caplog, text):
    picture(pipe)
    before = len(calibration.noted())
    (cache / "other.json").write_bytes(text.encode(errors="surrogateescape"))
    assert len(calibration.noted()) == before
    assert "other.json is passed over" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"), [("args", [{"shape": "x", "dtype": "float32"}]), ("args", 3), ("dtype", "load"), ("config", [])]
)
def test_a_field_that_does_not_fit_is_passed_over(pipe, cache, caplog, name, value):
    picture(pipe)
    path = next(cache.iterdir())
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    assert len(calibration.noted()) == 1
    assert "is passed over" in caplog.text


def test_the_newest_are_kept(pipe, cache, monkeypatch):
    monkeypatch.setattr(drawn, "_MOST", 3)
    for count in (1, 2, 3):
        picture(pipe, count)
    assert len(list(cache.iterdir())) == 3


def test_a_folder_that_cannot_be_written_stops_no_picture(pipe, cache):
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text("a file where the folder would be")
    assert torch.isfinite(picture(pipe)).all()


def test_plans_count_where_data_are_shipped_too(monkeypatch):
    """`sm_90`'s were timed: what `tune` measured there is used all the same, unless it is switched off."""
    assert was_timed("sm_90")
    gpu = torch.device("cuda")
    monkeypatch.delenv("ROCM_SD_CALIBRATE")
    assert (calibration.counts(gpu), calibration.counts(CPU)) == (True, False)
    monkeypatch.setenv("ROCM_SD_CALIBRATE", "0")
    assert not calibration.counts(gpu)
