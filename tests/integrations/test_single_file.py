from __future__ import annotations

import pytest
import torch
from diffusers import StableDiffusionPipeline

from pipelines import tiny_pipeline
from rocm_sd.cli.pictures import difference
from rocm_sd.errors import ModelNotFound, Unsupported
from rocm_sd.integrations import diffusers as host
from rocm_sd.integrations.diffusers.loading import save_single_file
from rocm_sd.models import ModelKind, resolve
from rocm_sd.models.emoji import MODEL_FOLDER

CPU = torch.device("cpu")


@pytest.mark.parametrize("model", ["tiny", "emoji-sd"])
def test_a_checkpoint_of_one_file_draws_the_same_picture(model, tmp_path):
    if model == "tiny":
        tiny_pipeline(tmp_path).save_pretrained(tmp_path / "folder")
        folder = tmp_path / "folder"
    else:
        folder = MODEL_FOLDER
    request = host.Request("a frog", steps=2, width=32, height=32)
    pipe = StableDiffusionPipeline.from_pretrained(folder)
    wanted = host.generate(pipe, request).images[0]
    save_single_file(pipe, tmp_path / "model.safetensors")
    source = resolve(tmp_path / "model.safetensors")
    assert source.kind is ModelKind.FILE
    loaded = host.load_pipeline(source, CPU, config=str(folder))
    for part in ("unet", "vae", "text_encoder"):
        before, after = getattr(pipe, part).state_dict(), getattr(loaded, part).state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
    # The weights are equal; a kernel that another alignment of memory picks may round one value otherwise.
    assert difference(host.generate(loaded, request).images[0], wanted)[1] <= 1


def test_without_configs_and_without_the_hub_the_way_out_is_named(tmp_path, monkeypatch):
    from huggingface_hub.errors import LocalEntryNotFoundError

    def unreachable(*_arguments, **_options):
        raise LocalEntryNotFoundError("no connection")

    save_single_file(tiny_pipeline(tmp_path), tmp_path / "model.safetensors")
    monkeypatch.setattr(StableDiffusionPipeline, "from_single_file", unreachable)
    with pytest.raises(ModelNotFound, match="give --config FOLDER"):
        host.load_pipeline(resolve(tmp_path / "model.safetensors"), CPU)


def test_what_is_no_stable_diffusion_1_is_refused(tmp_path):
    with pytest.raises(Unsupported, match="it takes Stable Diffusion"):
        save_single_file(object(), tmp_path / "model.safetensors")


def test_what_has_another_text_encoder_in_the_original_is_refused(tmp_path):
    pipe = tiny_pipeline(tmp_path)
    pipe.unet.register_to_config(use_linear_projection=True)
    with pytest.raises(Unsupported, match=r"Stable Diffusion 2\.x"):
        save_single_file(pipe, tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()
