"""Settings that come with the package, on the model that they were measured with."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path

import pytest
import torch

import rocm_sd
from rocm_sd import models
from rocm_sd.engine.approximation import shipped
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
