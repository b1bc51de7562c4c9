from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from pipelines import tiny_pipeline
from rocm_sd.errors import CorruptModel, DeviceUnavailable, InvalidOption, Unsupported
from rocm_sd.integrations import diffusers as host
from rocm_sd.integrations.diffusers.loading import default_device
from rocm_sd.models import resolve

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_pipeline(tmp_path_factory.mktemp("tokenizer")).save_pretrained(folder)
    return folder


def test_a_folder_loads_in_the_dtype_of_its_device(folder):
    pipe = host.load_pipeline(resolve(folder), CPU)
    assert pipe.unet.dtype == torch.float32


def test_weights_that_do_not_fit_the_config_are_explained(folder, tmp_path):
    import json
    import shutil

    broken = shutil.copytree(folder, tmp_path / "broken")
    config = json.loads((broken / "unet" / "config.json").read_text())
    (broken / "unet" / "config.json").write_text(json.dumps(config | {"block_out_channels": [64, 128]}))
    with pytest.raises(CorruptModel, match="could not be loaded"):
        host.load_pipeline(resolve(broken), CPU)


def test_a_file_with_other_weights_is_no_checkpoint(tmp_path):
    save_file({"lora.up": torch.zeros(2, 2)}, tmp_path / "lora.safetensors")
    with pytest.raises(CorruptModel, match="not a Stable Diffusion checkpoint"):
        host.load_pipeline(resolve(tmp_path / "lora.safetensors"), CPU)


@pytest.mark.parametrize("name", list(host.SCHEDULERS))
def test_every_scheduler_draws(folder, name):
    pipe = host.load_pipeline(resolve(folder), CPU)
    host.set_scheduler(pipe, name)
    steps = []
    drawn = host.generate(pipe, host.Request("a frog", steps=3, width=16, height=16, batch=2), steps.append)
    assert [image.size for image in drawn.images] == [(16, 16)] * 2
    assert steps[-1] >= 3
    assert drawn.seconds > 0


def test_an_unknown_scheduler_is_refused_with_the_known_ones(folder):
    pipe = host.load_pipeline(resolve(folder), CPU)
    with pytest.raises(InvalidOption, match="Use one of: ddim"):
        host.set_scheduler(pipe, "magic")


def test_a_seed_gives_the_same_picture_whatever_the_batch(folder):
    pipe = host.load_pipeline(resolve(folder), CPU)
    one, two = (
        host.generate(pipe, host.Request("a frog", steps=2, width=16, height=16, seed=seed, batch=batch)).images
        for seed, batch in ((1, 1), (0, 2))
    )
    assert one[0].tobytes() == two[1].tobytes()


@pytest.mark.parametrize("options", [{"steps": 0}, {"batch": 0}, {"width": 100}, {"height": 4}])
def test_a_request_that_cannot_be_drawn_is_refused(options):
    with pytest.raises(Unsupported, match="generate does not support"):
        host.Request("a frog", **options)


def test_a_device_that_is_not_there_is_said_not_to_be_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceUnavailable, match="torch sees no GPU"):
        default_device("cuda")
    assert default_device() == CPU
