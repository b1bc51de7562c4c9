from __future__ import annotations

import json
import shutil

import pytest

from pipelines import tiny_pipeline
from rocm_sd.errors import CorruptModel, ModelNotFound
from rocm_sd.models import ModelKind, resolve


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_pipeline(tmp_path_factory.mktemp("tokenizer")).save_pretrained(folder)
    return folder


@pytest.fixture
def model(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "model")


def test_a_whole_folder_is_a_model(model):
    assert resolve(model).kind is ModelKind.FOLDER


def test_a_name_with_an_owner_is_a_hub_id():
    assert resolve("owner/some-model.v2").kind is ModelKind.HUB


@pytest.mark.parametrize("name", ["./missing", "/missing/model", "~/missing", "model.safetensors", "one", "a/b/c"])
def test_what_is_nowhere_is_said_to_be_nowhere(name):
    with pytest.raises(ModelNotFound, match=r"There is no model at .* Give a Diffusers folder"):
        resolve(name)


def test_a_folder_without_an_index_is_no_model(tmp_path):
    with pytest.raises(ModelNotFound, match=r"no model_index\.json"):
        resolve(tmp_path)


def test_an_unreadable_index_is_named(model):
    (model / "model_index.json").write_text("{")
    with pytest.raises(CorruptModel, match=r"model_index\.json is not readable JSON"):
        resolve(model)


def test_a_missing_part_is_named(model):
    shutil.rmtree(model / "text_encoder")
    with pytest.raises(CorruptModel, match="text_encoder/ is missing"):
        resolve(model)


def test_missing_weights_are_named(model):
    next((model / "unet").glob("*.safetensors")).unlink()
    with pytest.raises(CorruptModel, match=r"unet has no \.safetensors weights"):
        resolve(model)


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty"])
def test_damaged_weights_are_named(model, damage):
    file = next((model / "vae").glob("*.safetensors"))
    content = file.read_bytes()
    file.write_bytes({"truncated": content[: len(content) // 2], "garbage": b"\xff" * 64, "empty": b""}[damage])
    with pytest.raises(CorruptModel, match=r"safetensors is damaged or incomplete .* Copy or download it again"):
        resolve(model)


def test_a_header_without_weights_is_refused(tmp_path):
    file = tmp_path / "empty.safetensors"
    header = json.dumps({"__metadata__": {}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CorruptModel, match="holds no weights"):
        resolve(file)


def test_a_pickle_is_never_loaded(tmp_path):
    file = tmp_path / "model.ckpt"
    file.write_bytes(b"\x80\x04")
    with pytest.raises(CorruptModel, match="can run any code"):
        resolve(file)


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("hello")
    with pytest.raises(CorruptModel, match="is not a checkpoint"):
        resolve(file)
