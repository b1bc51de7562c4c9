"""CLIP score and FID over a file of prompts: tiny models in local folders, real loading, real drawing."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor

from pipelines import tiny_tokenizer
from rocm_sd.bench import accuracy
from rocm_sd.bench.engines import chosen
from rocm_sd.bench.records import UnreadableRecord
from rocm_sd.bench.workloads import make
from rocm_sd.cli import main
from rocm_sd.errors import InvalidOption, RocmSdError, Unsupported
from rocm_sd.integrations.diffusers.loading import load_clip
from rocm_sd.quality.scoring import Scorer, Statistics, read_statistics
from rocm_sd.quality.similarity import clip_score, frechet_distance

CPU = torch.device("cpu")
PROMPTS = ("a frog", "a red car", "a smiling face")


class Means(nn.Module):
    """Three features: the mean of each colour."""

    def forward(self, images):
        return images.mean((2, 3))


def pictures(count=6, size=16, seed=0):
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def statistics_of(images):
    features = Means()(images).double()
    return Statistics(features.mean(0), torch.cov(features.T))


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer(folder)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = small | {"vocab_size": len(tokenizer), "max_position_embeddings": 16, "eos_token_id": tokenizer.eos_token_id}
    config = CLIPConfig(text_config=text, vision_config=small | {"image_size": 32, "patch_size": 16}, projection_dim=8)
    CLIPModel(config).save_pretrained(folder)
    processor = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    CLIPProcessor(processor, tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n")
    return file


def rocm_sd(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main.run(["bench", *arguments])
    return int(ended.value.code or 0)


class TestScorer:
    def test_the_fid_is_that_of_the_pictures_that_the_statistics_are_of(self):
        real, drawn = pictures(seed=1), pictures(seed=2) * 0.8
        scorer = Scorer(reference=statistics_of(real), inception=(Means(), 16))
        scorer.add(drawn[:2], ["a"] * 2)
        scorer.add(drawn[2:], ["a"] * 4)
        assert scorer.scores().fid == pytest.approx(frechet_distance(real, drawn, Means(), 16), rel=1e-4)
        same = Scorer(reference=statistics_of(real), inception=(Means(), 16))
        same.add(real, ["a"] * 6)
        assert same.scores().fid == pytest.approx(0, abs=1e-6)

    def test_the_clip_score_is_torchmetrics_own(self, clip):
        images, texts = pictures(4, 32), ["a", "frog", "cat", "a cat"]
        scorer = Scorer(clip=lambda: load_clip(str(clip)))
        scorer.add(images[:1], texts[:1])
        scorer.add(images[1:], texts[1:])
        assert scorer.scores().clip_score == pytest.approx(
            clip_score(images, texts, lambda: load_clip(str(clip))), rel=1e-4
        )
        assert scorer.scores().fid is None

    def test_what_was_summed_up_goes_on(self, tmp_path, clip):
        def made():
            return Scorer(clip=lambda: load_clip(str(clip)), reference=statistics_of(pictures(6, 32, 1)),
                          inception=(Means(), 32))  # fmt: skip

        images, texts = pictures(6, 32, 3), ["a frog"] * 6
        whole, first, second = made(), made(), made()
        whole.add(images, texts)
        first.add(images[:4], texts[:4])
        first.save(tmp_path / "kept.safetensors", {"prompts": "x"})
        assert not second.load(tmp_path / "kept.safetensors", {"prompts": "y"}), "it is about something else"
        assert second.load(tmp_path / "kept.safetensors", {"prompts": "x"})
        assert second.pictures == 4
        second.add(images[4:], texts[4:])
        assert second.scores().fid == pytest.approx(whole.scores().fid, rel=1e-6)
        assert second.scores().clip_score == pytest.approx(whole.scores().clip_score, rel=1e-6)

    @pytest.mark.parametrize("content", [b"", b"no weights", b"\xff" * 64])
    def test_a_broken_file_is_started_anew(self, tmp_path, content):
        (tmp_path / "kept.safetensors").write_bytes(content)
        scorer = Scorer(reference=statistics_of(pictures()), inception=(Means(), 16))
        assert not scorer.load(tmp_path / "kept.safetensors", {})
        assert not scorer.load(tmp_path / "not-there", {})
        assert scorer.pictures == 0

    def test_one_picture_has_no_fid(self):
        scorer = Scorer(reference=statistics_of(pictures()), inception=(Means(), 16))
        assert scorer.scores() == Scorer().scores()
        scorer.add(pictures(1), ["a"])
        assert scorer.scores().fid is None

    def test_statistics_of_another_network_are_refused(self):
        wide = Statistics(torch.zeros(7).double(), torch.eye(7).double())
        with pytest.raises(InvalidOption, match="7 features"):
            Scorer(reference=wide, inception=(Means(), 16))

    def test_inception_that_is_not_installed_is_named(self, tmp_path, monkeypatch):
        from torchmetrics.image import fid

        monkeypatch.setattr(fid, "_TORCH_FIDELITY_AVAILABLE", False)
        with pytest.raises(RocmSdError, match="torch-fidelity"):
            Scorer(reference=statistics_of(pictures()), inception=tmp_path / "weights.pth")


class TestStatistics:
    def test_read(self, tmp_path):
        known = statistics_of(pictures())
        np.savez(tmp_path / "real.npz", mu=known.mean.numpy(), sigma=known.covariance.numpy())
        found = read_statistics(tmp_path / "real.npz")
        assert torch.equal(found.mean, known.mean)
        assert torch.equal(found.covariance, known.covariance)

    @pytest.mark.parametrize(
        ("arrays", "why"),
        [
            ({"mu": np.zeros(3)}, "no sigma"),
            ({"mu": np.zeros(3), "sigma": np.eye(2)}, "shapes"),
            ({"mu": np.full(3, np.nan), "sigma": np.eye(3)}, "not finite"),
            ({"mu": np.zeros(3), "sigma": -np.eye(3)}, "no covariance"),
            ({"mu": np.zeros(3), "sigma": np.triu(np.ones((3, 3)))}, "no covariance"),
            ({"mu": np.array([{}], dtype=object), "sigma": np.eye(1)}, "pickle"),
            ({"mu": np.array(["x"]), "sigma": np.eye(1)}, "convert"),
        ],
    )
    def test_what_is_none_is_refused_with_the_reason(self, tmp_path, arrays, why):
        np.savez(tmp_path / "real.npz", **arrays)
        with pytest.raises(InvalidOption) as refused:
            read_statistics(tmp_path / "real.npz")
        assert why in str(refused.value)

    @pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x93NUMPY" + b"\0" * 40])
    def test_what_is_no_archive_is_refused(self, tmp_path, content):
        (tmp_path / "real.npz").write_bytes(content)
        with pytest.raises(InvalidOption):
            read_statistics(tmp_path / "real.npz")
        with pytest.raises(InvalidOption):
            read_statistics(tmp_path)


class TestPrompts:
    def test_lines_and_mlperfs_table(self, tmp_path):
        (tmp_path / "p.txt").write_text("a frog\n\n  a cat \n")
        assert accuracy.read_prompts(tmp_path / "p.txt") == ("a frog", "a cat")
        (tmp_path / "p.tsv").write_text('id\tcaption\tname\n1\tA man, "so to say"\tx.jpg\n2\tA dog\ty.jpg\n')
        assert accuracy.read_prompts(tmp_path / "p.tsv") == ('A man, "so to say"', "A dog")

    @pytest.mark.parametrize(
        ("name", "content"), [("p.txt", b"one\n"), ("p.txt", b"\xff\xfe"), ("p.tsv", b"id\ttext\n1\tx\n2\ty\n")]
    )
    def test_what_does_not_fit_is_said(self, tmp_path, name, content):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InvalidOption):
            accuracy.read_prompts(tmp_path / name)
        with pytest.raises(InvalidOption):
            accuracy.read_prompts(tmp_path / "not-there.txt")


@pytest.fixture(scope="module")
def emoji():
    return make("emoji", CPU, steps=1)


def scored(emoji, out, clip, **options):
    return accuracy.run(
        emoji, chosen(["stock", "rocm-sd"], CPU), PROMPTS, lambda: Scorer(clip=lambda: load_clip(str(clip))),
        out=out, clip=clip.name, command="rocm-sd bench emoji --accuracy", **options,
    )  # fmt: skip


def test_engines_draw_the_same_pictures_of_the_users_prompts(emoji, tmp_path, clip):
    record = scored(emoji, tmp_path, clip, batch=2)
    stock, ours = record.results
    assert (stock.engine, ours.engine) == ("stock", "rocm-sd")
    assert stock.pictures == ours.pictures == 3
    assert stock.clip_score == pytest.approx(ours.clip_score, rel=1e-3)
    assert AccuracyFile.of(tmp_path) == record
    assert not list(tmp_path.glob("*.safetensors")), "sums are kept while a run is under way"
    first = emoji.pictures_of(emoji.pipeline(), PROMPTS[:1], 0)
    assert first.shape == (1, 3, 128, 128)
    assert not torch.equal(first, emoji.pictures_of(emoji.pipeline(), PROMPTS[:1], 1)), "each has noise of its own"


class AccuracyFile:
    @staticmethod
    def of(folder):
        return accuracy.AccuracyRecord.load(accuracy.record_file(folder, "emoji"))


def test_an_interrupted_run_goes_on_where_it_was(emoji, tmp_path, clip):
    def stop(done, _total, _what):
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scored(emoji, tmp_path, clip, progress=stop)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    seen = []
    record = scored(emoji, tmp_path, clip, progress=lambda done, *_: seen.append(done))
    assert seen == [4, 5], "stock was done, and one of ours"
    assert [one.pictures for one in record.results] == [3, 3]
    assert record.results[0].clip_score == pytest.approx(record.results[1].clip_score, rel=1e-3)


def test_random_weights_show_nothing(tmp_path, clip):
    tiny = make("sd15-512", CPU, tiny=True)
    with pytest.raises(Unsupported, match="random weights"):
        scored(tiny, tmp_path, clip)


def test_mlperfs_bounds_hold_for_its_own_run_alone(emoji, tmp_path, clip):
    record = scored(emoji, tmp_path, clip)
    one = record.results[0]
    assert accuracy.verdict(record, one) == ""
    mlperf = replace(record, prompts=5000, workload=replace(record.workload, name="sdxl-mlperf", steps=20))
    assert accuracy.verdict(mlperf, replace(one, clip_score=31.75, fid=23.5)) == "within MLPerf's bounds"
    assert "no fid" in accuracy.verdict(mlperf, replace(one, clip_score=31.75, fid=None))
    assert "clip_score" in accuracy.verdict(mlperf, replace(one, clip_score=31.0, fid=23.5))
    assert "fid" in accuracy.verdict(mlperf, replace(one, clip_score=31.75, fid=24.0))


def test_a_record_that_is_none_is_refused(emoji, tmp_path, clip):
    record = scored(emoji, tmp_path, clip)
    values = record.to_dict()
    for broken in ({**values, "format": "x"}, {**values, "prompts": 0}, {**values, "prompts_sha256": "x"}, []):
        (tmp_path / "broken.json").write_text(json.dumps(broken))
        with pytest.raises(UnreadableRecord):
            accuracy.AccuracyRecord.load(tmp_path / "broken.json")


def test_the_command_scores_and_prints(prompts, clip, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    out = ("--out", str(tmp_path / "out"), "--device", "cpu")
    asked = ("emoji", "--accuracy", "--prompts", str(prompts), "--clip", str(clip), "--steps", "1", *out)
    assert rocm_sd(*asked, "--engines", "stock") == 0
    printed = capsys.readouterr().out
    for words in ("3 prompts", "CLIP score", "not asked for", "emoji-accuracy.json"):
        assert words in printed
    record = accuracy.AccuracyRecord.load(tmp_path / "out/emoji-accuracy.json")
    assert str(tmp_path) not in json.dumps(record.to_dict()), "folders are a person's own"
    assert "--prompts prompts.txt" in record.command


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("emoji", "--accuracy"), "--prompts"),
        (("emoji", "--accuracy", "--prompts", "P"), "--clip FOLDER"),
        (("emoji", "--accuracy", "--prompts", "P", "--clip", "C", "--repeats", "3"), "--repeats"),
        (("emoji", "--clip", "C"), "without --accuracy"),
        (("emoji", "--accuracy", "--prompts", "P", "--reference", "R"), "--inception"),
        (("emoji", "--accuracy", "--prompts", "P", "--clip", "C", "--inception", "I"), "--reference"),
        (("emoji", "--accuracy", "--prompts", "P", "--clip", "C", "--batch", "1,2"), "give one"),
        (("emoji", "--accuracy", "--prompts", "P", "--clip", "nowhere"), "nowhere is no"),  # CLIP model, or not here
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_drawn(prompts, clip, arguments, words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    given = [{"P": str(prompts), "C": str(clip)}.get(argument, argument) for argument in arguments]
    assert rocm_sd(*given, "--device", "cpu") != 0
    assert words in capsys.readouterr().err
