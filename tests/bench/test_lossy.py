"""Engines that approximate: held to their definition, scored, and never listed without it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import rocm_sd
from pipelines import tiny_pipeline
from rocm_sd.bench import lossy, runner, subjects, tables
from rocm_sd.bench.engines import Engine, engines, stock
from rocm_sd.bench.gate import WRONG
from rocm_sd.bench.workloads import make
from rocm_sd.engine import Approximation, Skipping
from rocm_sd.engine.approximation import remember

SETTING = Approximation(Skipping(depth=1, every=2, guided_every=2))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A model with weights and a text encoder, for which a setting is known from 4 steps on."""
    folder = tmp_path_factory.mktemp("model")
    tiny_pipeline(folder).save_pretrained(folder / "tiny")
    return make("sd15-512", torch.device("cpu"), model=str(folder / "tiny"), steps=5)


@pytest.fixture(autouse=True)
def small(drawn, tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "cache"))
    side = drawn._base.unet.config.sample_size * drawn._base.vae_scale_factor
    drawn.facts = dataclasses.replace(drawn.facts, height=side, width=side)
    monkeypatch.setattr(subjects, "default_count", lambda _device: 3)
    remember(drawn.pipeline().unet, "high", 4, SETTING, "for the test", {})


def lossy_engine(name, prepare, setting="some steps", definition=None):
    defined = definition or (lambda pipe, _steps: lossy.by_definition(pipe, SETTING))
    return Engine(
        name, "a test", prepare, lambda _device: None, lambda: "1", lossy.Lossy("high", lambda *_: setting, defined)
    )


def test_a_lossy_engine_is_timed_with_its_scores(drawn, tmp_path, quick):
    record = runner.run(drawn, [stock, engines()["rocm-sd"], engines()["rocm-sd-high"]], [1], out=tmp_path, repeats=4)
    _, exact, ours = record.measurements
    assert exact.quality.verdict == "exact"
    assert len(ours.ms) == 4
    assert ours.quality.name == "high"
    assert ours.quality.setting == str(SETTING)
    assert ours.quality.prompts == 3
    assert all(psnr < 200 for psnr in ours.quality.psnr_db), "it does leave something out"
    assert ours.error <= 2 * ours.stock_error + torch.finfo(torch.float32).eps
    assert ours.floor_ms is None
    # What draws other pictures is no rival of the exact engine.
    assert [(c.engine, c.against) for c in record.comparisons] == [("rocm-sd", "stock"), ("rocm-sd-high", "stock")]
    row = tables.rows(record)[2]
    assert (row["quality"], row["prompts"], row["pictures"]) == ("high", "3", ours.quality.verdict)
    assert row["PSNR dB"]
    assert row["SSIM"]
    assert row["match points"] == "not measured"
    assert tables.LOSSY_NOTE in tables.markdown(record)


def test_the_same_engine_without_its_name_for_lossy_is_wrong(drawn, tmp_path, quick):
    """The gate of exact engines stays as it is: who does not say that it approximates is held to exactness."""
    plain = dataclasses.replace(engines()["rocm-sd-high"], name="sly", lossy=None)
    plain = dataclasses.replace(plain, prepare=lambda pipe: rocm_sd.optimize(pipe, quality=SETTING))
    record = runner.run(drawn, [plain], [1], out=tmp_path, repeats=1)
    assert record.measurements[0].left_out.startswith(WRONG)


def spoiled(pipe):
    pipe = rocm_sd.optimize(pipe, quality=SETTING)
    with torch.no_grad():
        pipe.unet.conv_out.weight.mul_(1.001)
    return pipe


@pytest.mark.parametrize(
    "prepare",
    [
        spoiled,
        lambda pipe: rocm_sd.optimize(pipe, quality=Skipping(depth=1, every=3, guided_every=3)),
        lambda pipe: rocm_sd.optimize(pipe, quality=Skipping(depth=1, every=2, order=1, guided_every=2)),
        rocm_sd.optimize,
    ],
    ids=["wrong weights", "other steps", "extrapolated", "exact"],
)
def test_what_is_not_its_definition_is_not_timed(drawn, tmp_path, quick, prepare):
    record = runner.run(drawn, [lossy_engine("other", prepare)], [1], out=tmp_path, repeats=1)
    (found,) = record.measurements
    assert found.ms == ()
    assert found.left_out.startswith(WRONG)


def test_one_that_leaves_nothing_out_is_not_called_high(drawn, tmp_path, quick, monkeypatch):
    monkeypatch.setattr(drawn, "facts", dataclasses.replace(drawn.facts, steps=3))
    record = runner.run(drawn, [engines()["rocm-sd-high"]], [1], out=tmp_path, repeats=1)
    assert "leaves nothing out of pictures of 3 steps" in record.measurements[0].left_out
    assert "rocm-sd tune --quality MODEL --steps 3" in record.measurements[0].left_out
    assert record.measurements[0].ms == ()


def test_random_weights_show_nothing(work, tmp_path, quick):
    record = runner.run(work, [engines()["rocm-sd-high"]], [1], out=tmp_path, repeats=1)
    assert "random weights show nothing of quality" in record.measurements[0].left_out


def test_without_a_definition_the_pictures_decide_and_it_is_said(drawn, tmp_path, quick):
    engine = lossy_engine("coarse", lambda pipe: rocm_sd.optimize(pipe, quality=SETTING), definition=lambda *_: None)
    record = runner.run(drawn, [engine], [1], out=tmp_path, repeats=1)
    (found,) = record.measurements
    assert found.notes == (lossy.NO_DEFINITION,)
    assert found.error is None
    assert found.quality.is_scored


@pytest.mark.parametrize(
    "approximation",
    [
        Approximation(SETTING.skipping, merged=0.5),
        Approximation(merged=0.5, eight_bits="int8"),
        Approximation(small_decoder=True),
        Approximation(Skipping(first_block=0.1)),
    ],
)
def test_what_is_computed_decides_and_there_is_no_definition(approximation):
    assert lossy.definition_of(approximation) is None
    assert lossy.definition_of(SETTING) is not None


def test_scores_are_drawn_once_for_all_batch_sizes(drawn, tmp_path, quick, monkeypatch):
    asked = []
    real = lossy.draw
    monkeypatch.setattr(lossy, "draw", lambda *arguments: asked.append(arguments[2]) or real(*arguments))
    record = runner.run(drawn, [engines()["rocm-sd-high"]], [1, 2], out=tmp_path, repeats=1)
    one, two = record.measurements
    assert one.quality == two.quality
    assert len(asked) == 6, "three prompts of stock and three of its own"
