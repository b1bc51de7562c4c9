"""The parts of ComfyUI that emoji-sd's nodes touch, as small as they can be. USED says which; a test holds both the
fakes and a real host to it.
"""

# ruff: noqa: ARG002, ARG003, ARG005 -- the parameters are the host's

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType

from torch import nn

# File of the host: class.method or function, and the parameters that are given by name or by place.
USED = {
    "comfy/sd.py": {
        "VAE.__init__": ["sd", "config"],
        "load_state_dict_guess_config": ["sd", "output_vae", "embedding_directory"],
    },
    "comfy/utils.py": {"load_torch_file": ["ckpt", "safe_load"]},
    "comfy/model_detection.py": {"detect_unet_config": ["state_dict", "key_prefix"]},
    "comfy/supported_models_base.py": {
        "BASE.matches": ["unet_config", "state_dict"],
        "BASE.model_type": ["state_dict", "prefix"],
        "BASE.process_vae_state_dict": ["state_dict"],
        "ClipTarget.__init__": ["tokenizer", "clip"],
    },
    "comfy/clip_model.py": {
        "CLIPTextModel.__init__": ["config_dict", "dtype", "device", "operations"],
        "CLIPTextModel.set_input_embeddings": ["embeddings"],
    },
    "comfy/sd1_clip.py": {
        "SDClipModel.__init__": [
            "device", "dtype", "max_length", "textmodel_json_config", "model_class", "special_tokens",
            "return_projected_pooled", "model_options",
        ],
        "SD1ClipModel.__init__": ["device", "dtype", "model_options", "clip_model"],
        "SDTokenizer.__init__": [
            "tokenizer_path", "max_length", "embedding_directory", "embedding_size", "tokenizer_data",
        ],
        "SD1Tokenizer.__init__": ["embedding_directory", "tokenizer_data", "tokenizer"],
    },
    "folder_paths.py": {
        "get_filename_list": ["folder_name"],
        "get_full_path_or_raise": ["folder_name", "filename"],
        "get_folder_paths": ["folder_name"],
    },
}  # fmt: skip


class BASE:
    unet_config: dict = {}  # noqa: RUF012 -- as the host has it

    def __init__(self, unet_config):
        self.unet_config = dict(unet_config)

    @classmethod
    def matches(cls, unet_config, state_dict=None):
        return all(unet_config.get(key) == value for key, value in cls.unet_config.items())

    def model_type(self, state_dict, prefix=""):
        return ModelType.EPS

    def process_vae_state_dict(self, state_dict):
        return state_dict


class ClipTarget:
    def __init__(self, tokenizer, clip):
        self.tokenizer, self.clip = tokenizer, clip


class ModelType(Enum):
    EPS = 1
    V_PREDICTION = 2


class LatentFormat:
    scale_factor = 1.0
    latent_rgb_factors = None
    latent_rgb_factors_bias = None


class CLIPTextModel:
    def __init__(self, config_dict, dtype, device, operations):
        self.embeddings = "49408 words"

    def set_input_embeddings(self, embeddings):
        self.embeddings = embeddings


class SDClipModel:
    def __init__(
        self, device="cpu", max_length=77, textmodel_json_config=None, dtype=None, model_class=CLIPTextModel,
        special_tokens=None, return_projected_pooled=True, model_options=None,
    ):  # fmt: skip
        self.config, self.special_tokens, self.model_class = textmodel_json_config, special_tokens, model_class


class SD1ClipModel:
    def __init__(self, device="cpu", dtype=None, model_options=None, clip_name="l", clip_model=SDClipModel):
        self.clip_l = clip_model(device=device, dtype=dtype, model_options={"model_name": "clip_l"})


class SDTokenizer:
    def __init__(
        self, tokenizer_path=None, max_length=77, embedding_directory=None, embedding_size=768, tokenizer_data=None
    ):
        self.path, self.size = tokenizer_path, embedding_size


class SD1Tokenizer:
    def __init__(self, embedding_directory=None, tokenizer_data=None, clip_name="l", tokenizer=SDTokenizer):
        self.clip_l = tokenizer(embedding_directory=embedding_directory, tokenizer_data=tokenizer_data)


class VAE:
    def __init__(self, sd=None, config=None):
        self.weights, self.layout = sd, config["params"]
        self.downscale_ratio = self.upscale_ratio = 8
        self.first_stage_model = nn.Sequential(nn.GroupNorm(32, 64), nn.Conv2d(64, 64, 1), nn.GroupNorm(32, 96))


def detect_unet_config(state_dict, key_prefix):
    width = state_dict[f"{key_prefix}input_blocks.0.0.weight"].shape[0]
    found = {"model_channels": width, "adm_in_channels": None, "use_linear_in_transformer": False}
    found |= {"use_temporal_attention": False, "context_dim": 192}
    return found | {"channel_mult": [1, 2, 3, 3], "num_res_blocks": [1, 1, 1, 1]}


def modules(files=None):
    """The host's modules by name, for sys.modules. `files` are checkpoints by name."""
    files = files or {}
    supported = ModuleType("comfy.supported_models")
    supported.SD15 = type("SD15", (BASE,), {"unet_config": {"model_channels": 320}})
    supported.models = [supported.SD15]

    def load_state_dict_guess_config(sd, output_vae=True, embedding_directory=None):
        found = detect_unet_config(sd, "model.diffusion_model.")
        kind = next(kind for kind in supported.models if kind.matches(found, sd))
        return kind(found), "clip", None if not output_vae else "vae", None

    parts = {
        "comfy.supported_models": vars(supported),
        "comfy.supported_models_base": {"BASE": BASE, "ClipTarget": ClipTarget},
        "comfy.model_base": {"ModelType": ModelType},
        "comfy.latent_formats": {"LatentFormat": LatentFormat},
        "comfy.clip_model": {"CLIPTextModel": CLIPTextModel},
        "comfy.sd1_clip": {
            "SDClipModel": SDClipModel,
            "SD1ClipModel": SD1ClipModel,
            "SDTokenizer": SDTokenizer,
            "SD1Tokenizer": SD1Tokenizer,
        },
        "comfy.sd": {"VAE": VAE, "load_state_dict_guess_config": load_state_dict_guess_config},
        "comfy.utils": {"load_torch_file": lambda ckpt, safe_load=False: dict(files[ckpt])},
        "comfy.model_detection": {"detect_unet_config": detect_unet_config},
        "folder_paths": {
            "get_filename_list": lambda folder_name: list(files),
            "get_full_path_or_raise": lambda folder_name, filename: filename,
            "get_folder_paths": lambda folder_name: [],
        },
    }
    made = {"comfy": ModuleType("comfy")}
    for name, inside in parts.items():
        module = ModuleType(name)
        vars(module).update({key: value for key, value in inside.items() if not key.startswith("__")})
        made[name] = module
        if name.startswith("comfy."):
            setattr(made["comfy"], name.removeprefix("comfy."), module)
    return made


def put(monkeypatch, files=None):
    made = modules(files)
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made
