"""A Diffusers folder written as one checkpoint is what Diffusers' own single-file loading reads back."""

from __future__ import annotations

import errno
import json
import shutil

import pytest
import torch
import typer
from diffusers import StableDiffusionPipeline
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from pipelines import tiny_pipeline
from rocm_sd.cli.export import export
from rocm_sd.cli.pictures import difference
from rocm_sd.errors import InvalidOption, ModelNotFound, NoDiskSpace, RocmSdError, Unsupported
from rocm_sd.integrations import diffusers as host
from rocm_sd.integrations.diffusers.loading import single_file_weights
from rocm_sd.models import resolve, single_file
from rocm_sd.models.emoji import MODEL_FOLDER
from rocm_sd.models.single_file import write_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_pipeline(tmp_path_factory.mktemp("tokenizer")).save_pretrained(folder)
    return folder


@pytest.fixture
def own(tiny, tmp_path):
    return shutil.copytree(tiny, tmp_path / "own")


@pytest.mark.parametrize("model", ["tiny", "emoji-sd"])
def test_the_file_draws_what_the_folder_draws(model, tiny, tmp_path):
    folder = tiny if model == "tiny" else MODEL_FOLDER
    written = write_checkpoint(folder, tmp_path / "model.safetensors", name=model)
    assert written.size == written.path.stat().st_size
    pipe = StableDiffusionPipeline.from_pretrained(folder)
    assert set(load_file(written.path)) == set(single_file_weights(pipe))
    loaded = host.load_pipeline(resolve(written.path), CPU, config=str(folder))
    for part in ("unet", "vae", "text_encoder"):
        before, after = getattr(pipe, part).state_dict(), getattr(loaded, part).state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
    request = host.Request("a frog", steps=2, width=32, height=32)
    pictures = [host.generate(drawing, request).images[0] for drawing in (pipe, loaded)]
    # The weights are equal; a kernel that another alignment of memory picks may round one value otherwise.
    assert difference(*pictures)[1] <= 1


def test_weights_keep_their_dtype_and_facts_are_inside(tmp_path):
    file = write_checkpoint(MODEL_FOLDER, tmp_path / "emoji.safetensors", name="emoji-sd").path
    assert {tensor.dtype for tensor in load_file(file).values()} == {torch.float16}
    with safe_open(file, framework="pt") as opened:
        facts = opened.metadata()
    assert facts["modelspec.title"] == "emoji-sd"
    assert json.loads(facts["rocm_sd.prediction_type"]) == "v_prediction"
    assert json.loads(facts["rocm_sd.vae_groups"]) == 16


def test_a_folder_of_early_diffusers_gives_the_same_file(own, tmp_path):
    new = load_file(write_checkpoint(own, tmp_path / "new.safetensors", name="m").path)
    weights = own / "vae/diffusion_pytorch_model.safetensors"
    renamed = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    old = {}
    for name, tensor in load_file(weights).items():
        for today, then in renamed.items():
            name = name.replace(f"attentions.0.{today}.", f"attentions.0.{then}.")  # noqa: PLW2901
        old[name] = tensor
    save_file(old, weights)
    text = own / "text_encoder/model.safetensors"
    save_file(load_file(text) | {"text_model.embeddings.position_ids": torch.arange(77)[None]}, text)
    again = load_file(write_checkpoint(own, tmp_path / "old.safetensors", name="m").path)
    assert again.keys() == new.keys()
    assert all(torch.equal(again[name], new[name]) for name in new)


def test_shards_and_variants_are_found(own, tmp_path):
    whole = load_file(write_checkpoint(own, tmp_path / "whole.safetensors", name="m").path)
    unet = own / "unet"
    weights = load_file(unet / "diffusion_pytorch_model.safetensors")
    (unet / "diffusion_pytorch_model.safetensors").unlink()
    names = sorted(weights)
    parts = {"part-1.safetensors": names[::2], "part-2.safetensors": names[1::2]}
    for file, inside in parts.items():
        save_file({name: weights[name] for name in inside}, unet / file)
    where = {name: file for file, inside in parts.items() for name in inside}
    (unet / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    vae = own / "vae/diffusion_pytorch_model.safetensors"
    vae.rename(vae.with_name("diffusion_pytorch_model.fp16.safetensors"))
    again = load_file(write_checkpoint(own, tmp_path / "again.safetensors", name="m").path)
    assert again.keys() == whole.keys()
    assert all(torch.equal(again[name], whole[name]) for name in whole)


def test_an_earlier_file_is_kept_unless_forced(tiny, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"mine")
    with pytest.raises(RocmSdError, match="is there already"):
        write_checkpoint(tiny, file, name="m")
    assert file.read_bytes() == b"mine"
    write_checkpoint(tiny, file, name="m", force=True)
    assert len(load_file(file)) > 100


def test_a_full_disk_leaves_nothing_half_written(tiny, tmp_path, monkeypatch):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"mine")

    def full(_weights, path, **_options):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(single_file, "save_file", full)
    with pytest.raises(NoDiskSpace):
        write_checkpoint(tiny, file, name="m", force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert file.read_bytes() == b"mine"


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("part", "changes", "words"),
    [
        ("model_index.json", {"text_encoder_2": ["transformers", "X"]}, "it takes Stable Diffusion 1.x"),
        ("unet/config.json", {"use_linear_projection": True}, "Stable Diffusion 2.x"),
    ],
)
def test_other_models_are_refused_by_name(own, tmp_path, part, changes, words):
    edit(own / part, **changes)
    with pytest.raises(Unsupported, match=words):
        write_checkpoint(own, tmp_path / "model.safetensors", name="m")
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("part", "layer"),
    [
        ("unet", "add_embedding.linear_1.weight"),
        ("unet", "down_blocks.0.resnets.0.time_norm.weight"),
        ("vae", "decoder.up_blocks.0.attentions.0.to_q.weight"),
    ],
)
def test_a_layer_without_a_place_is_named(own, tmp_path, part, layer):
    file = own / part / "diffusion_pytorch_model.safetensors"
    save_file(load_file(file) | {layer: torch.zeros(2, 2)}, file)
    with pytest.raises(Unsupported, match=layer):
        write_checkpoint(own, tmp_path / "model.safetensors", name="m")


def test_what_cannot_be_written_or_read_is_said(own, tmp_path):
    with pytest.raises(InvalidOption, match=r"ends in \.safetensors"):
        write_checkpoint(own, tmp_path / "model.ckpt", name="m")
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(InvalidOption, match="It is a folder"):
        write_checkpoint(own, tmp_path / "folder.safetensors", name="m")
    (own / "vae/diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"holds no \.safetensors"):
        write_checkpoint(own, tmp_path / "model.safetensors", name="m")


def test_the_command_writes_and_says_what_to_do_next(tiny, tmp_path):
    app = typer.Typer()
    app.command()(export)
    run = CliRunner().invoke
    made = run(app, ["--out", str(tmp_path / "emoji-sd.safetensors")])
    assert made.exit_code == 0, made.output
    assert "emoji-sd Loader (ROCm)" in made.output
    made = run(app, ["--out", str(tmp_path / "tiny.safetensors"), "--model", str(tiny)])
    assert made.exit_code == 0, made.output
    assert "emoji-sd Loader" not in made.output
    refused = run(app, ["--out", str(tmp_path / "x.safetensors"), "--model", str(tmp_path / "tiny.safetensors")])
    assert isinstance(refused.exception, Unsupported)
