"""A real ComfyUI in this process, on the CPU: from the folder that ROCM_SD_COMFYUI names, where it names one.

Its packages for sound, video and torch's own vision library are not needed for Stable Diffusion. Where they are
missing, empty modules stand in for them: the host imports them at the top of its files.
"""

# ruff: noqa: ARG002 -- the signatures are the import system's
from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from functools import cache
from pathlib import Path
from typing import ClassVar

import pytest
import torch

FOLDER = os.environ.get("ROCM_SD_COMFYUI", "")
_NOT_NEEDED = ("torchaudio", "torchvision", "av", "torchsde", "kornia", "spandrel", "comfy_aimdo", "comfy_kitchen")


class _StandIn(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        return self


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _StandIn(spec.name)

    def exec_module(self, module):
        pass


@cache
def _load() -> str | None:
    """None once it is loaded, or why it is not."""
    if not FOLDER:
        return "ROCM_SD_COMFYUI names no folder"
    if not (Path(FOLDER) / "comfy" / "model_patcher.py").is_file():
        return f"{FOLDER} is no ComfyUI"
    sys.path.append(FOLDER)
    missing = [name for name in _NOT_NEEDED if importlib.util.find_spec(name) is None]
    sys.meta_path.append(_StandIns(missing))
    try:
        from comfy.cli_args import args

        args.cpu = True
        for name in ("comfy.model_management", "comfy.sd", "comfy.sample", "comfy.model_patcher"):
            importlib.import_module(name)
    except ImportError as error:
        return f"this ComfyUI needs what is not installed: {error}"
    return None


def need() -> None:
    reason = _load()
    if reason is not None:
        pytest.skip(reason)


def fill(module: torch.nn.Module, seed: int = 0) -> None:
    """Random weights of a trained model's scale: the host's layers come with whatever was in memory."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                scale = parameter[0].numel() ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            else:
                norm = 1.0 if name.endswith("weight") else 0.0
                parameter.copy_(norm + 0.1 * torch.randn(parameter.shape, generator=generator))
            parameter.requires_grad_(False)


SMALL = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 64, "num_res_blocks": 1,
    "channel_mult": [1, 2], "num_heads": 2, "transformer_depth": [1, 1], "transformer_depth_middle": 1,
    "transformer_depth_output": [1, 1, 1, 1], "use_spatial_transformer": True, "context_dim": 24, "legacy": False,
    "use_linear_in_transformer": False, "adm_in_channels": None,
}  # fmt: skip
# SD 2.1 and SDXL: linear projections and heads of one size; SDXL also has a vector, and blocks without attention.
KINDS = {
    "sd15": {},
    "sd21": {"use_linear_in_transformer": True, "num_heads": -1, "num_head_channels": 64},
    "sdxl": {
        "use_linear_in_transformer": True, "num_heads": -1, "num_head_channels": 64, "num_classes": "sequential",
        "adm_in_channels": 2816, "transformer_depth": [0, 2], "transformer_depth_middle": 2,
        "transformer_depth_output": [0, 0, 2, 2],
    },
}  # fmt: skip


def unet_config(kind: str = "sd15", dtype: torch.dtype = torch.float32) -> dict:
    config = {**SMALL, **KINDS[kind], "dtype": dtype}
    return {name: list(value) if isinstance(value, list) else value for name, value in config.items()}


def base_model(kind: str = "sd15", dtype: torch.dtype = torch.float32):
    """The host's BaseModel around a small UNet."""
    import comfy.model_base
    import comfy.supported_models

    kinds = {"sd15": "SD15", "sd21": "SD20", "sdxl": "SDXL"}
    config = getattr(comfy.supported_models, kinds[kind])(unet_config(kind, dtype))
    whole = comfy.model_base.SDXL if kind == "sdxl" else comfy.model_base.BaseModel
    model = whole(config, device="cpu")
    model.diffusion_model.eval()
    fill(model.diffusion_model)
    return model


def patcher(kind: str = "sd15", dtype: torch.dtype = torch.float32):
    import comfy.model_patcher

    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(base_model(kind, dtype), load_device=cpu, offload_device=cpu)


def vae(dtype: torch.dtype = torch.float32):
    """The host's VAE with small first-stage weights of Stable Diffusion's kind."""
    import comfy.ldm.models.autoencoder
    import comfy.sd

    config = {
        "double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 32,
        "ch_mult": [1, 2, 2, 2], "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0,
    }  # fmt: skip
    model = comfy.ldm.models.autoencoder.AutoencoderKL(ddconfig=config, embed_dim=4).eval()
    fill(model)
    model.to(dtype)
    params = {"params": {"ddconfig": config, "embed_dim": 4}}
    return comfy.sd.VAE(sd=dict(model.state_dict()), device=torch.device("cpu"), config=params, dtype=dtype)
