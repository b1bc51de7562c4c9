from __future__ import annotations

import launch_comfyui
import pytest
import real_comfyui

from rocm_sd.integrations import installing
from rocm_sd.models.emoji import MODEL_FOLDER
from rocm_sd.models.single_file import write_checkpoint

if real_comfyui.HOST:
    # The host's packages are on the path of this process, too: Diffusers would stumble over their torchvision.
    launch_comfyui.put_stand_ins()


@pytest.fixture(scope="session")
def host():
    if not real_comfyui.HOST:
        pytest.skip("ROCM_SD_COMFYUI names no folder")
    return real_comfyui.HOST


@pytest.fixture(scope="session")
def base(host, tmp_path_factory):
    """What a user has after `rocm-sd install comfyui` and `rocm-sd export`."""
    base = tmp_path_factory.mktemp("comfyui")
    for folder in ("custom_nodes", "models/checkpoints", "user"):
        (base / folder).mkdir(parents=True)
    installing.place(installing.recognise("comfyui", base))
    write_checkpoint(MODEL_FOLDER, base / "models/checkpoints/emoji-sd.safetensors", name="emoji-sd")
    return base


@pytest.fixture(scope="session")
def server(base):
    with real_comfyui.running(base, "--preview-method", "latent2rgb") as server:
        yield server
