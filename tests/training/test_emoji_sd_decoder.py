"""The small decoder's stage at a size that takes seconds: what it learns from, what it writes, and that it is the same
again.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from skimage.metrics import structural_similarity
from training.emoji_sd import train_decoder
from training.emoji_sd.train_decoder import begin_as_teacher, ssim, turned

from rocm_sd.models.emoji import MODEL_FOLDER
from rocm_sd.models.emoji.decoder import EmojiDecoder, load_decoder, teacher_of


@pytest.fixture(scope="module")
def vae():
    return AutoencoderKL.from_pretrained(MODEL_FOLDER / "vae")


def trained(out, **extra):
    options = {
        "out": out, "device": "cpu", "batch": 2, "steps": 2, "drawn": 2, "draw-steps": 1, "draw-batch": 2, "check": 2,
        "check-steps": 1, "log-every": 1, "warmup": 1, "shape": "96,1,16,8", "glyphs": out / "none.bin",
    }  # fmt: skip
    train_decoder.main([text for key, value in {**options, **extra}.items() for text in (f"--{key}", str(value))])
    return out / "decoder.safetensors"


@pytest.mark.parametrize("extra", [{}, {"pool": 16}], ids=["fresh", "pool"])
def test_the_stage_writes_a_decoder_and_its_record(tmp_path, vae, extra):
    file = trained(tmp_path / "first", **extra)
    model, teacher = load_decoder(file)
    assert teacher == teacher_of(vae)
    with torch.no_grad():
        assert model(torch.zeros(1, 4, 8, 12)).shape == (1, 3, 32, 48)
    record = json.loads((tmp_path / "first" / "decoder.json").read_text())
    assert record["bytes"] == file.stat().st_size
    assert record["parameters"] == sum(p.numel() for p in model.parameters())
    assert record["checked"] == 2
    assert record["psnr_worst"] <= record["psnr_median"]
    rows = [json.loads(line) for line in (tmp_path / "first" / "decoder.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [0, 1]
    # Seeds are fixed: the same again.
    again, _ = load_decoder(trained(tmp_path / "second", **extra))
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_glyphs_are_used_where_there_are_some(tmp_path, cache):
    trained(tmp_path, glyphs=cache / "glyphs.bin")
    assert json.loads((tmp_path / "decoder.json").read_text())["pictures"] == "glyphs"


def test_it_begins_with_the_vaes_weights(vae):
    decoder = EmojiDecoder()
    begin_as_teacher(decoder, vae)
    z = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    theirs = vae.decoder
    with torch.no_grad():
        x = decoder.conv_in(decoder.quant(z))
        y = theirs.conv_in(vae.post_quant_conv(z))
        assert torch.equal(x, y)
        torch.testing.assert_close(decoder.blocks[0](x), theirs.mid_block.resnets[0](y, None), atol=1e-5, rtol=1e-5)
    narrow = EmojiDecoder(channels=32)
    before = narrow.conv_in.weight.clone()
    begin_as_teacher(narrow, vae)
    assert torch.equal(narrow.conv_in.weight, before)


def test_ssim_is_the_usual_one():
    random = torch.Generator().manual_seed(0)
    a = torch.rand(3, 3, 20, 24, generator=random, dtype=torch.float64)
    b = (a + 0.2 * torch.rand(a.shape, generator=random, dtype=torch.float64)).clamp(0, 1)
    usual = [
        structural_similarity(one.numpy(), other.numpy(), channel_axis=0, data_range=1.0)
        for one, other in zip(a, b, strict=True)
    ]
    # That one fills its windows beyond the frame, and leaves these out of the mean, as here.
    assert ssim(a, b).tolist() == pytest.approx(usual, abs=1e-9)
    assert ssim(a, a).tolist() == pytest.approx([1] * 3)


def test_turned_pictures_are_pictures():
    pictures = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    first, second = (turned(pictures, pictures.roll(1, 0), np.random.default_rng(4)) for _ in range(2))
    assert torch.equal(first, second)
    assert first.shape == pictures.shape
    assert float(first.abs().max()) <= 1
    assert not torch.equal(first, pictures)
