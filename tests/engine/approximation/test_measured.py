"""Settings that were found on the user's own model: kept by its weights, and damaged files left out."""

from __future__ import annotations

import json

import pytest
import torch

import rocm_sd
from pipelines import CASES
from rocm_sd.engine.approximation import Approximation, Skipping, eight_bits, known, remember
from rocm_sd.engine.approximation.measured import fingerprint
from rocm_sd.errors import InvalidOption
from tiny_models import unet_of

SKIPPING = Approximation(Skipping(depth=1, every=2))


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quality.json"


def test_what_is_remembered_is_found_by_the_weights(cache):
    unet = unet_of("sd15")
    assert remember(unet, "high", 20, SKIPPING, "so fast", {"psnr": 31.0}) == cache
    remember(unet, "high", 50, Approximation(Skipping(depth=1, every=4)), "faster", {})
    remember(unet, "balanced", 20, Approximation(), "nothing within it", {})
    assert [(s.from_steps, s.skipping.every) for s in known(unet, "high")] == [(20, 2), (50, 4)]
    assert known(unet, "high")[0].why == "measured here: so fast"
    assert known(unet, "balanced")[0].skipping.is_exact
    assert known(unet, "psnr=30") == []
    # In another dtype it is the same model; with other weights it is another.
    assert len(known(unet.to(torch.float64), "high")) == 2
    unet.conv_in.weight.data += 1
    assert known(unet, "high") == []


def test_the_last_one_counts():
    unet = unet_of("sd15")
    remember(unet, "high", 20, SKIPPING, "then", {})
    remember(unet, "high", 20, Approximation(Skipping(depth=2, every=3)), "now", {})
    assert [setting.why for setting in known(unet, "high")] == ["measured here: now"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"settings": 3}', '{"settings": [3, {}]}', '{"settings": [{"model": 1}]}']
)
def test_a_damaged_file_is_left_out_and_written_anew(cache, text):
    unet = unet_of("sd15")
    cache.parent.mkdir()
    cache.write_text(text)
    assert known(unet, "high") == []
    remember(unet, "high", 20, SKIPPING, "now", {})
    assert len(known(unet, "high")) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"approximation": {"skipping": {"depth": -1}}}, {"approximation": {"skipping": {"speed": 3}}},
        {"approximation": {"eight_bits": "int4"}}, {"approximation": {"merged": "x"}}, {"approximation": 3},
        {"approximation": {"skipping": 3}}, {"steps": "x"}, {"steps": None},
    ],
)  # fmt: skip
def test_a_damaged_entry_is_left_out(cache, wrong):
    unet = unet_of("sd15")
    remember(unet, "high", 20, SKIPPING, "now", {})
    record = json.loads(cache.read_text())
    record["settings"].append(record["settings"][0] | wrong)
    cache.write_text(json.dumps(record))
    assert [setting.from_steps for setting in known(unet, "high")] == [20]


def test_weights_that_lie_nowhere_have_no_fingerprint():
    unet = unet_of("sd15")
    with torch.device("meta"):
        unet.conv_in = torch.nn.Conv2d(4, 8, 3)
    assert fingerprint(unet) is None
    assert known(unet, "high") == []


@pytest.mark.parametrize("name", ["sd3", "flux-dev"])
def test_transformers_are_known_by_their_ends(tmp_path, name):
    first, again, other = (CASES[name].build(tmp_path, seed).transformer for seed in (0, 0, 1))
    assert fingerprint(first) == fingerprint(again.to(torch.bfloat16)) != fingerprint(other)
    remember(first, "high", 20, Approximation(Skipping(first_block=0.1)), "so fast", {})
    assert [setting.skipping.first_block for setting in known(again, "high")] == [0.1]
    assert known(other, "high") == []
    for layer in (first.x_embedder if name == "flux-dev" else first.pos_embed.proj, first.proj_out):
        before = fingerprint(first)
        layer.weight.data += 1
        assert fingerprint(first) != before


def test_a_model_of_another_kind_has_no_fingerprint():
    assert fingerprint(torch.nn.Linear(2, 2)) is None


def test_optimize_takes_what_was_measured(tmp_path):
    pipe = CASES["sd15"].build(tmp_path)
    for quality in ("high", "psnr=30,ssim=0.9"):
        rocm_sd.optimize(pipe, quality=quality)
        (note,) = rocm_sd.report(pipe).approximations
        assert "nothing was measured" in note
        assert "rocm-sd tune --quality" in note
        remember(pipe.unet, quality, 4, SKIPPING, "so fast", {})
        rocm_sd.optimize(pipe, quality=quality)
        assert any("measured here: so fast" in note for note in rocm_sd.report(pipe).approximations)
    with pytest.raises(InvalidOption):
        rocm_sd.optimize(pipe, quality="psnr=fast")


def test_eight_bits_that_were_measured_stand_alone():
    unet = unet_of("sd15", cross_attention_dim=192, block_out_channels=(64, 64))
    shipped = known(unet, "high")
    assert len(shipped) == 2, "as wide as emoji-sd"
    remember(unet, "high", 20, SKIPPING, "so fast", {})
    assert [setting.from_steps for setting in known(unet, "high")] == [16, 20, 40]
    for coarse in (Approximation(eight_bits="int8"), Approximation(eight_bit_decoder="int8")):
        remember(unet, "high", 20, coarse, "so fast", {})
        assert [setting.approximation for setting in known(unet, "high")] == [coarse]


@pytest.mark.parametrize("part", ["eight_bits", "eight_bit_decoder"])
def test_eight_bits_alone_say_where_they_were_measured(tmp_path, monkeypatch, part):
    monkeypatch.setattr(eight_bits, "_SMALLEST", 4)
    pipe, asked = CASES["sd15"].build(tmp_path), Approximation(**{part: "int8"})
    remember(pipe.unet, "high", 1, asked, "1.3 times as fast", {"psnr_db": [41.0, 43.0], "ssim": [0.99, 0.97]})
    report = rocm_sd.report(rocm_sd.optimize(pipe, quality="high"))
    kind = "UNet2DConditionModel" if part == "eight_bits" else "AutoencoderKL"
    assert f"{kind} is approximated: {asked} (measured here: 1.3 times as fast)" in report.approximations
    (found,) = report.facts.approximated
    assert "layers in int8" in found.what
    assert found.cost == "PSNR 42.0 dB, SSIM 0.980"
    rocm_sd.restore(pipe)


def test_settings_that_do_not_agree_on_eight_bits_keep_the_dtype_and_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr(eight_bits, "_SMALLEST", 4)
    pipe = CASES["sd15"].build(tmp_path)
    remember(pipe.unet, "high", 20, Approximation(eight_bits="int8"), "so fast", {})
    rocm_sd.optimize(pipe, quality="high")
    notes = " / ".join(rocm_sd.report(pipe).approximations)
    assert "layers multiply in int8" in notes
    assert "pictures of fewer than 20 steps are in int8, too: not measured" in notes
    remember(pipe.unet, "high", 50, SKIPPING, "so fast", {})
    rocm_sd.optimize(pipe, quality="high")
    notes = " / ".join(rocm_sd.report(pipe).approximations)
    assert "layers multiply in int8" not in notes
    assert "keeps its dtype: settings differ in eight bits (int8 from 20 on, none from 50 on)" in notes
    assert "rocm-sd tune --quality" in notes
    rocm_sd.restore(pipe)
