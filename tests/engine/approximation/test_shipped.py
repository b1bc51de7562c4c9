"""Settings that come with the package, on the model that they were measured with."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path

import pytest
import torch
from diffusers import UNet2DConditionModel

import rocm_sd
from pipelines import CASES, call
from rocm_sd import models
from rocm_sd.engine.approximation import chosen, shipped
from rocm_sd.engine.approximation.shipped import family, of_steps
from rocm_sd.integrations import diffusers as host
from rocm_sd.quality.budget import BUDGETS
from tiny_models import unet_of

ROOT = Path(__file__).resolve().parents[3]
ENTRIES = json.loads(
    resources.files("rocm_sd.engine.approximation").joinpath("shipped.json").read_text(encoding="utf-8")
)["settings"]


@pytest.fixture(scope="module")
def pipe():
    return host.load_pipeline(models.resolve(), torch.device("cpu"))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: f"{e['family']}-{e['quality']}-{e['from_steps']}")
def test_each_names_a_record_that_says_the_same(entry):
    measured = entry["measured"]
    record = json.loads((ROOT / measured["file"]).read_text(encoding="utf-8"))
    assert (record["steps"], record["prompts"], record["device"]) == (
        measured["steps"], measured["prompts"], measured["on"],
    )  # fmt: skip
    (row,) = [row for row in record["settings"] if row["setting"] == entry["approximation"]["skipping"]]
    assert round(row["psnr median"], 1) == measured["psnr"]
    assert round(row["ssim mean"], 3) == measured["ssim"]
    assert [round(100 * value, 1) for value in row["top-1 difference"]] == measured["match"]
    budget = BUDGETS[entry["quality"]]
    assert measured["psnr"] >= budget.psnr
    assert measured["ssim"] >= budget.ssim
    assert measured["match"][0] >= -budget.match


def test_settings_go_by_the_number_of_steps(pipe):
    settings = shipped(pipe.unet, "high")
    assert [setting.from_steps for setting in settings] == sorted(setting.from_steps for setting in settings)
    assert of_steps(settings, 4).skipping.is_exact
    assert of_steps(settings, 20) is settings[0]
    assert of_steps(settings, 50) is settings[-1]


def test_families():
    assert family(unet_of("sd15")) is None
    assert family(object()) is None
    assert shipped(unet_of("sd15"), "high") == []


REAL = {
    "SD 1.5": {"cross_attention_dim": 768},
    "SDXL": {
        "cross_attention_dim": 2048, "block_out_channels": (320, 640, 1280), "use_linear_projection": True,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("quality", ["high", "balanced"])
def test_a_family_without_a_setting_is_exact_and_says_why_and_what_to_type(name, quality, pipe):
    with torch.device("meta"):
        unet = UNet2DConditionModel(**REAL[name])
    assert family(unet) == name
    found, (note,) = chosen(pipe, [unet], quality, in_halves=False)
    assert found == {}
    assert note.startswith("UNet2DConditionModel is exact: nothing was measured for it")
    assert f"no setting for {name} comes with rocm-sd" in note
    assert note.endswith("type: rocm-sd tune --quality MODEL")


def test_a_pipeline_that_nothing_was_measured_for_draws_exact_pictures_and_the_report_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "cache"))
    ours = CASES["sd15"].build(tmp_path)
    exact = call(ours, CASES["sd15"])
    rocm_sd.optimize(ours, quality="high")
    torch.testing.assert_close(call(ours, CASES["sd15"]), exact, rtol=1e-3, atol=1e-3)
    lines = str(rocm_sd.report(ours))
    assert "Quality high: exact until you type: rocm-sd tune --quality MODEL" in lines
    (note,) = rocm_sd.report(ours).approximations
    assert "no setting for models like it comes with rocm-sd" in note
    rocm_sd.optimize(ours, quality="psnr=32")
    (note,) = rocm_sd.report(ours).approximations
    assert note.endswith("type: rocm-sd tune --quality MODEL --within psnr=32")


@pytest.mark.parametrize(("quality", "least"), [("high", 35), ("balanced", 25)])
def test_emoji_sd_within_its_budget(pipe, quality, least):
    request = host.Request("a frog on a pink background", steps=16, guidance=3.0)
    rocm_sd.restore(pipe)
    exact = host.generate(pipe, request).images[0]
    rocm_sd.optimize(pipe, quality=quality)
    ours = host.generate(pipe, request).images[0]
    one, other = (torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).double() for image in (exact, ours))
    psnr = float(10 * torch.log10(255**2 / (one - other).square().mean()))
    assert least < psnr < 60
    report = rocm_sd.report(pipe)
    notes = " ".join(report.approximations)
    assert set(report.approximations) <= set(report.notes)
    assert "is approximated" in notes
    assert "NVIDIA H200" in notes
    assert re.search(r"calls so far: \d+ whole, \d+ shallow, \d+ guidance reused", notes)
