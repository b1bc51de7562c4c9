from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rocm_sd.errors import ModelNotFound, Unsupported
from rocm_sd.integrations.diffusers.loading import load_clip
from rocm_sd.quality.prompt_match import bootstrap, difference_interval
from rocm_sd.quality.similarity import clip_score, frechet_distance, similarity


def pictures(count=4, size=32, seed=0):
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def test_equal_pictures_are_infinitely_near():
    found = similarity(pictures(), pictures())
    assert found.psnr == [math.inf] * 4
    assert found.ssim == pytest.approx([1.0] * 4)


def test_psnr_is_the_known_figure():
    """Every value off by 0.1: mse 0.01, so 20 dB."""
    found = similarity(torch.full((1, 3, 16, 16), 0.5), torch.full((1, 3, 16, 16), 0.6))
    assert found.worst_psnr == pytest.approx(20.0, abs=1e-4)


def test_noise_lowers_ssim():
    clean = pictures()
    noisy = (clean + 0.3 * torch.randn(clean.shape, generator=torch.Generator().manual_seed(1))).clamp(0, 1)
    assert similarity(clean, noisy).mean_ssim < 0.9


def test_shapes_must_agree():
    with pytest.raises(Unsupported, match="different shapes"):
        similarity(pictures(2), pictures(3))


class Means(nn.Module):
    def forward(self, images):
        return images.mean((2, 3))


def test_frechet_distance_of_shifted_sets_is_the_squared_shift():
    """Equal covariances, means 0.2 apart in each of three features: 3 * 0.04."""
    first = pictures(64, 8)
    assert frechet_distance(first, first + 0.2, Means(), 8) == pytest.approx(0.12, rel=1e-3)
    assert frechet_distance(first, first, Means(), 8) == pytest.approx(0, abs=1e-6)


def test_one_picture_is_no_set():
    with pytest.raises(Unsupported, match="fewer than two"):
        frechet_distance(pictures(1), pictures(2), Means(), 32)


def test_clip_score_by_local_weights(tmp_path):
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor

    from pipelines import tiny_tokenizer

    torch.manual_seed(0)
    tokenizer = tiny_tokenizer(tmp_path)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = small | {"vocab_size": len(tokenizer), "max_position_embeddings": 16, "eos_token_id": tokenizer.eos_token_id}
    config = CLIPConfig(text_config=text, vision_config=small | {"image_size": 32, "patch_size": 16}, projection_dim=8)
    CLIPModel(config).save_pretrained(tmp_path / "clip")
    processor = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    CLIPProcessor(processor, tokenizer).save_pretrained(tmp_path / "clip")
    score = clip_score(pictures(3), ["a", "frog", "cat"], lambda: load_clip(str(tmp_path / "clip")))
    assert 0 <= score <= 100
    with pytest.raises(ModelNotFound, match="is no CLIP model"):
        load_clip(str(tmp_path))


def test_the_bootstrap_interval_holds_the_share_and_narrows():
    few, many = bootstrap([True, False] * 10), bootstrap([True, False] * 1000)
    assert few.low < few.value == 0.5 < few.high
    assert many.high - many.low < (few.high - few.low) / 5
    assert bootstrap([True] * 10).low == 1.0
    assert str(many).startswith("50.0% (")


def test_a_difference_is_seen_only_beyond_the_noise():
    hits = [number % 3 != 0 for number in range(300)]
    same = difference_interval(hits, hits)
    assert (same.low, same.value, same.high) == (0, 0, 0)
    worse = difference_interval(hits, [hit and number % 2 == 0 for number, hit in enumerate(hits)])
    assert worse.low > 0.2
