"""A Diffusers folder of Stable Diffusion 1.x as one .safetensors checkpoint in the layout of the original code.

Diffusers names a layer by its block, the original by its number; the weights are the same, and stay in their dtype.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from rocm_sd.errors import FULL, CorruptModel, InvalidOption, ModelNotFound, NoDiskSpace, RocmSdError, Unsupported
from rocm_sd.files import is_special, whole
from rocm_sd.models.source import not_json
from rocm_sd.plain_json import read_json, shortened

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["Component", "Written", "checkpoint_weights", "read_part", "write_checkpoint"]

_UNET_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}
_UNET_ENDS = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
    "mid_block.resnets.0": "middle_block.0",
    "mid_block.attentions.0": "middle_block.1",
    "mid_block.resnets.1": "middle_block.2",
}
_VAE_PARTS = {
    "mid_block.resnets.0": "mid.block_1",
    "mid_block.resnets.1": "mid.block_2",
    "mid_block.attentions.0.group_norm": "mid.attn_1.norm",
    "mid_block.attentions.0.to_q": "mid.attn_1.q",
    "mid_block.attentions.0.to_k": "mid.attn_1.k",
    "mid_block.attentions.0.to_v": "mid.attn_1.v",
    "mid_block.attentions.0.to_out.0": "mid.attn_1.proj_out",
    # What folders written by early Diffusers call the same four.
    "mid_block.attentions.0.query": "mid.attn_1.q",
    "mid_block.attentions.0.key": "mid.attn_1.k",
    "mid_block.attentions.0.value": "mid.attn_1.v",
    "mid_block.attentions.0.proj_attn": "mid.attn_1.proj_out",
    "conv_norm_out": "norm_out",
    "conv_shortcut": "nin_shortcut",
    "downsamplers.0.conv": "downsample.conv",
    "upsamplers.0.conv": "upsample.conv",
}
_BLOCK = re.compile(r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.+)")
_LEFT_OVER = re.compile(r"resnets|attentions|_blocks|samplers|mid_block")
_WEIGHT_FILES = ("diffusion_pytorch_model", "model")


@dataclass(frozen=True)
class Component:
    """One component of a pipeline: its config.json and its weights by Diffusers' names."""

    config: Mapping[str, Any]
    weights: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Written:
    path: Path
    tensors: int
    size: int


def write_checkpoint(folder: Path, file: Path, *, name: str, force: bool = False) -> Written:
    """Write the pipeline of `folder` to `file`: whole or not at all, and over an earlier file only by `force`."""
    if file.suffix != ".safetensors":
        raise InvalidOption("--out", str(file), [], hint="Give a file name that ends in .safetensors.")
    if file.is_dir():
        raise InvalidOption("--out", str(file), [], hint="It is a folder: give a file name inside it.")
    if file.exists() and not is_special(file) and not force:
        raise RocmSdError(f"{file} is there already.", hint="Give another --out, or --force to write over it.")
    index = _json(folder / "model_index.json")
    if "text_encoder_2" in index or "unet" not in index:
        kind = index.get("_class_name", "a model of another kind")
        raise Unsupported("A checkpoint of one file", f"{kind}: it takes Stable Diffusion 1.x")
    unet, vae, text_encoder = (read_part(folder, part) for part in ("unet", "vae", "text_encoder"))
    weights = checkpoint_weights(unet, vae, text_encoder)
    metadata = _metadata(folder, name, unet, vae)
    with_size = _save_whole(weights, metadata, file)
    return Written(file, len(weights), with_size)


def checkpoint_weights(unet: Component, vae: Component, text_encoder: Component) -> dict[str, torch.Tensor]:
    """The three components' weights under the original's names; a layer that has none there is an error."""
    if unet.config.get("use_linear_projection"):
        # Its original text encoder is OpenCLIP's, whose layers have another layout: a host would not find them.
        raise Unsupported("A checkpoint of one file", "Stable Diffusion 2.x: it takes 1.x")
    weights: dict[str, torch.Tensor] = {}
    layers = int(unet.config["layers_per_block"])
    with_attention = [str(kind).startswith("CrossAttn") for kind in unet.config["up_block_types"]]
    for name, tensor in unet.weights.items():
        weights["model.diffusion_model." + _unet_name(name, layers, with_attention)] = tensor.contiguous()
    levels = len(vae.config["block_out_channels"])
    for name, tensor in vae.weights.items():
        # The original's attention projections are 1x1 convolutions.
        is_projection = ".attentions." in name and tensor.ndim == 2
        shaped = tensor[:, :, None, None] if is_projection else tensor
        weights["first_stage_model." + _vae_name(name, levels)] = shaped.contiguous()
    for name, tensor in text_encoder.weights.items():
        inner = name.removeprefix("text_model.")
        if inner != "embeddings.position_ids":  # 0, 1, 2, ...: not a weight, and every reader makes its own
            weights[f"cond_stage_model.transformer.text_model.{inner}"] = tensor.contiguous()
    return weights


def read_part(folder: Path, part: str) -> Component:
    inside = folder / part
    weights: dict[str, torch.Tensor] = {}
    for file in _weight_files(inside):
        weights |= _tensors(file)
    return Component(_json(inside / "config.json"), weights)


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise CorruptModel(f"{file} cannot be read ({error}).", hint="Copy or download the model again.") from error


def _weight_files(inside: Path) -> list[Path]:
    """The plain file, its shards, or a variant such as fp16 where that is all there is."""
    for stem in _WEIGHT_FILES:
        if (whole := inside / f"{stem}.safetensors").is_file():
            return [whole]
        if (index := inside / f"{stem}.safetensors.index.json").is_file():
            return _shards(index)
        if variants := sorted(inside.glob(f"{stem}.*.safetensors")):
            return variants[:1]
    raise ModelNotFound(f"{inside} holds no .safetensors weights.", hint="Give a folder saved with safetensors.")


def _shards(index: Path) -> list[Path]:
    """The files beside an index that it names: a stranger may have written it, and others are nobody's weights."""
    places = _json(index).get("weight_map")
    names = list(places.values()) if isinstance(places, dict) else []
    if not names or not all(isinstance(name, str) and name for name in names):
        raise CorruptModel(f"{index} names no files of weights.", hint="Download the model again.")
    for name in names:
        # No file system has longer names.
        if Path(name).name != name or name == ".." or "\0" in name or len(name) > 255:
            raise CorruptModel(
                f"{index} names {shortened(name)!r}, which is no file in its folder.", hint="Do not trust this model."
            )
    return sorted({index.parent / name for name in names})


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ModelNotFound(f"{file} is missing.", hint="Give a complete Diffusers folder.")
    read: dict[str, Any] = read_json(file, partial(not_json, file), of=dict, finite=False)
    return read


def _metadata(folder: Path, name: str, unet: Component, vae: Component) -> dict[str, str]:
    """What a reader cannot tell from the weights alone; safetensors keeps text by text."""
    scheduler = _json(folder / "scheduler" / "scheduler_config.json")
    facts = {key: scheduler.get(key) for key in ("prediction_type", "beta_schedule", "beta_start", "beta_end")}
    facts |= {"vae_scaling_factor": vae.config.get("scaling_factor"), "vae_groups": vae.config.get("norm_num_groups")}
    facts |= {"attention_heads": unet.config.get("attention_head_dim")}
    standard = {
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": "stable-diffusion-v1",
        "modelspec.implementation": "https://github.com/CompVis/stable-diffusion",
        "modelspec.title": name,
    }
    return standard | {f"rocm_sd.{key}": json.dumps(value) for key, value in facts.items() if value is not None}


def _save_whole(weights: dict[str, torch.Tensor], metadata: dict[str, str], file: Path) -> int:
    try:
        with whole(file) as unfinished:
            save_file(weights, unfinished, metadata=metadata)
            with safe_open(unfinished, framework="pt") as reopened:
                assert len(reopened.keys()) == len(weights)
            return unfinished.stat().st_size
    except (OSError, SafetensorError) as error:
        if getattr(error, "errno", None) in FULL or "No space left" in str(error):
            raise NoDiskSpace(file) from error
        raise InvalidOption("--out", str(file), [], hint=f"It cannot be written ({error}).") from error


def _unet_name(name: str, layers: int, with_attention: list[bool]) -> str:
    found = _BLOCK.match(name)
    if not found:
        prefix = next((prefix for prefix in _UNET_ENDS if name.startswith(f"{prefix}.")), None)
        if prefix is None:
            raise Unsupported("A checkpoint of one file", f"the UNet's layer {name}")
        rest = name.removeprefix(f"{prefix}.")
        return f"{_UNET_ENDS[prefix]}.{_resnet_part(name, rest) if '.resnets.' in name else rest}"
    side, block, kind, layer, rest = found[1], int(found[2]), found[3], int(found[4]), found[5]
    # One number for each layer and one for the sampler; on the way down after that of the first convolution.
    first = block * (layers + 1) + (side == "down")
    sampler = 0 if side == "down" else 2 if with_attention[block] else 1
    places = {"resnets": f"{first + layer}.0", "attentions": f"{first + layer}.1"}
    place = places.get(kind, f"{first + layers}.{sampler}")
    rest = rest.replace("conv.", "op.", 1) if kind == "downsamplers" else rest
    rest = _resnet_part(name, rest) if kind == "resnets" else rest
    return f"{'input' if side == 'down' else 'output'}_blocks.{place}.{rest}"


def _resnet_part(name: str, rest: str) -> str:
    part, _, leaf = rest.rpartition(".")
    if part not in _UNET_RESNET:
        raise Unsupported("A checkpoint of one file", f"the UNet's layer {name}")
    return f"{_UNET_RESNET[part]}.{leaf}"


def _vae_name(name: str, levels: int) -> str:
    found = re.match(r"(encoder|decoder)\.(down|up)_blocks\.(\d+)\.(.+)", name)
    mapped = name
    if found:
        # The original counts the decoder's levels from the largest picture down.
        level = int(found[3]) if found[2] == "down" else levels - 1 - int(found[3])
        rest = re.sub(r"resnets\.(\d+)\.", r"block.\1.", found[4])
        mapped = f"{found[1]}.{found[2]}.{level}.{rest}"
    for ours, original in _VAE_PARTS.items():
        mapped = mapped.replace(f"{ours}.", f"{original}.")
    if _LEFT_OVER.search(mapped):
        raise Unsupported("A checkpoint of one file", f"the VAE's layer {name}")
    return mapped
