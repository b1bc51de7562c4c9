"""The stages themselves, at a size that takes seconds: schedule, resume, export, packing, evaluation."""

from __future__ import annotations

import json
import time

import pytest
import torch
from training.emoji_sd import evaluate, export, train_autoencoder, train_embedding, train_unet
from training.emoji_sd.architecture import noise_schedule
from training.emoji_sd.loop import Budget

from rocm_sd.errors import CorruptModel, ModelNotFound


def test_the_schedule_lands_at_zero_by_steps_and_by_time(monkeypatch):
    by_steps = Budget(minutes=99, steps=200)
    factors = [by_steps.lr_factor(step, warmup=10) for step in range(201)]
    assert factors[0] == pytest.approx(0.1, rel=0.01)
    assert max(factors) == pytest.approx(1, abs=0.01)
    assert factors[200] == pytest.approx(0, abs=1e-12)
    assert factors[10:] == sorted(factors[10:], reverse=True)
    by_time = Budget(minutes=2, steps=None)
    now = time.monotonic()
    by_time.add(60)
    monkeypatch.setattr(time, "monotonic", lambda: now + 59.99)
    assert 0.999 < by_time.fraction(7) < 1
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    assert by_time.fraction(7) == 1
    assert by_time.lr_factor(7000, warmup=10) == pytest.approx(0, abs=1e-12)


def test_the_noise_schedule_hides_the_picture_and_stays_finite_in_fp16():
    alphas = noise_schedule().alphas_cumprod
    assert alphas[-1].sqrt() < 0.006
    assert ((1 - alphas) / alphas).sqrt().max() < 60000
    weights = train_unet.loss_weights(alphas)
    assert weights[-1] == pytest.approx(1)
    assert weights[0] < 0.01


def common(cache, out, **extra):
    options = {"out": out, "device": "cpu", "batch": 4, "steps": 2, "glyphs": cache / "glyphs.bin", "log-every": 1}
    return [text for key, value in {**options, **extra}.items() for text in (f"--{key}", str(value))]


@pytest.fixture(scope="module")
def trained(cache, tmp_path_factory):
    """All stages once, tiny."""
    out = tmp_path_factory.mktemp("run")
    train_embedding.main(common(cache, out, batch=10, **{"check-pictures": 10}))
    train_autoencoder.main(common(cache, out, preset="tiny"))
    extra = {"preset": "tiny", "tokenizer": cache / "tokenizer", "sample-count": 2, "sample-steps": 1}
    train_unet.main(common(cache, out, **extra))
    return out


def unet_steps(cache, trained, out, stop=None):
    """`stop` steps of a four-step schedule, or up to its end."""
    if not (out / "vae").exists():
        (out / "vae").symlink_to(trained / "vae")
    extra = {"preset": "tiny", "tokenizer": cache / "tokenizer", "sample-every": 0, "steps": 4}
    patch = pytest.MonkeyPatch()
    if stop is not None:
        taken = []
        original = train_unet.UNetStage.step

        def counted(self, step, made, lr):
            taken.append(step)
            return original(self, step, made, lr)

        patch.setattr(train_unet.UNetStage, "step", counted)
        patch.setattr(train_unet.Run, "must_stop", property(lambda _: len(taken) >= stop))
    try:
        train_unet.main(common(cache, out, **extra))
    finally:
        patch.undo()


def test_a_resumed_run_equals_an_uninterrupted_one(cache, trained, tmp_path):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    whole.mkdir()
    halves.mkdir()
    unet_steps(cache, trained, whole)
    unet_steps(cache, trained, halves, stop=2)
    middle = torch.load(halves / "unet.ckpt", weights_only=True)
    assert middle["step"] == 2
    unet_steps(cache, trained, halves)
    a, b = (torch.load(folder / "unet.ckpt", weights_only=True) for folder in (whole, halves))
    assert a["step"] == b["step"] == 4
    for name, value in a["stage"]["unet"].items():
        assert torch.equal(value, b["stage"]["unet"][name]), name
    for one, other in zip(a["stage"]["averages"], b["stage"]["averages"], strict=True):
        assert torch.equal(one, other)
    moved = [not torch.equal(value, middle["stage"]["unet"][name]) for name, value in a["stage"]["unet"].items()]
    assert any(moved)


def test_stages_leave_logs_and_grids(trained):
    for stage in ("embedding", "autoencoder", "unet"):
        rows = [json.loads(line) for line in (trained / f"{stage}.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows if "loss" in row] == [0, 1]
    assert (trained / "autoencoder.png").exists()
    assert list(trained.glob("samples-*.png"))


def test_a_damaged_checkpoint_is_named(cache, trained, tmp_path):
    (tmp_path / "vae").symlink_to(trained / "vae")
    (tmp_path / "unet.ckpt").write_bytes(b"not a checkpoint")
    extra = {"preset": "tiny", "tokenizer": cache / "tokenizer"}
    with pytest.raises(CorruptModel, match="--restart"):
        train_unet.main(common(cache, tmp_path, **extra))


def test_the_unet_stage_names_the_stage_it_misses(cache, tmp_path):
    with pytest.raises(ModelNotFound, match="train_autoencoder"):
        train_unet.main(common(cache, tmp_path, preset="tiny", tokenizer=cache / "tokenizer"))


def test_the_export_loads_in_plain_diffusers_and_survives_packing(cache, trained, tmp_path):
    from diffusers import StableDiffusionPipeline

    export.main(
        [
            *("--out", str(trained), "--tokenizer", str(cache / "tokenizer"), "--pack", str(tmp_path / "parts")),
            *("--check-steps", "1"),
        ]
    )
    export.main(["--unpack", str(tmp_path / "parts"), "--out", str(tmp_path / "back")])
    pipe = StableDiffusionPipeline.from_pretrained(tmp_path / "back" / "emoji-sd")
    assert pipe.safety_checker is None
    assert pipe.unet.dtype == pipe.text_encoder.dtype == pipe.vae.dtype == torch.float32
    assert pipe.vae_scale_factor == 4
    assert pipe.vae.config.scaling_factor == pytest.approx(
        json.loads((trained / "vae" / "config.json").read_text())["scaling_factor"]
    )
    state = torch.load(trained / "unet.ckpt", weights_only=True)["stage"]["averages"]
    # The averages are what is shipped, in half precision.
    assert torch.allclose(next(iter(pipe.unet.parameters())), state[0], atol=1e-3)
    embedding = tmp_path / "back" / "embedding.safetensors"
    assert embedding.read_bytes() == (trained / "embedding.safetensors").read_bytes()


def test_packing_refuses_an_empty_folder(tmp_path):
    with pytest.raises(ModelNotFound):
        export.unpack(tmp_path, tmp_path / "out")


def test_evaluation_reports_every_kind(cache, trained, capsys):
    if not (trained / "emoji-sd").exists():
        export.main(["--out", str(trained), "--tokenizer", str(cache / "tokenizer"), "--check-steps", "1"])
    evaluate.main(
        [
            *("--out", str(trained), "--device", "cpu", "--prompts", "4", "--steps", "1", "--batch", "4"),
            *("--guidance", "2", "3"),
        ]
    )
    reports = json.loads((trained / "metrics.json").read_text())
    assert [report["guidance"] for report in reports] == [2, 3]
    for report in reports:
        assert {"top1", "top5", "colour"} == set(report["trained"]) == set(report["held_out"])
        assert "both_top5" in report["held_out_pairs"]
    assert "guidance 3, held_out" in capsys.readouterr().out
    assert (trained / "evaluation-g2.png").exists()
