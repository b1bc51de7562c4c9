"""A Stable Diffusion 1.5 or 2.1 pipeline as one checkpoint in the layout of the original code, which every UI reads.

Diffusers names a layer by its block, the original by its number; the weights are the same.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file

from rocm_sd.errors import Unsupported

if TYPE_CHECKING:
    from pathlib import Path

    import torch

__all__ = ["save_single_file", "single_file_weights"]

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
    "conv_norm_out": "norm_out",
    "conv_shortcut": "nin_shortcut",
    "downsamplers.0.conv": "downsample.conv",
    "upsamplers.0.conv": "upsample.conv",
}
_BLOCK = re.compile(r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.+)")


def save_single_file(pipe: Any, file: Path) -> None:
    save_file(single_file_weights(pipe), file)


def single_file_weights(pipe: Any) -> dict[str, torch.Tensor]:
    if getattr(pipe, "text_encoder_2", None) is not None or not hasattr(pipe, "unet"):
        raise Unsupported("single file", f"a {type(pipe).__name__}: it takes Stable Diffusion 1.5 or 2.1")
    weights = {}
    layers = pipe.unet.config.layers_per_block
    with_attention = [name.startswith("CrossAttn") for name in pipe.unet.config.up_block_types]
    for name, tensor in pipe.unet.state_dict().items():
        weights["model.diffusion_model." + _unet_name(name, layers, with_attention)] = tensor.contiguous()
    levels = len(pipe.vae.config.block_out_channels)
    for name, tensor in pipe.vae.state_dict().items():
        # The original's attention projections are 1x1 convolutions.
        is_projection = ".attentions." in name and tensor.ndim == 2
        weights["first_stage_model." + _vae_name(name, levels)] = (
            tensor[:, :, None, None] if is_projection else tensor
        ).contiguous()
    for name, tensor in pipe.text_encoder.state_dict().items():
        inner = name.removeprefix("text_model.")
        weights[f"cond_stage_model.transformer.text_model.{inner}"] = tensor.contiguous()
    return weights


def _unet_name(name: str, layers: int, with_attention: list[bool]) -> str:
    found = _BLOCK.match(name)
    if not found:
        ends = (prefix for prefix in _UNET_ENDS if name.startswith(f"{prefix}."))
        prefix = next(ends)
        rest = name.removeprefix(f"{prefix}.")
        return f"{_UNET_ENDS[prefix]}.{_resnet_part(rest) if '.resnets.' in name else rest}"
    side, block, kind, layer, rest = found[1], int(found[2]), found[3], int(found[4]), found[5]
    if side == "down":
        # One number for each layer and one for the downsampler, after the first convolution.
        first = 1 + block * (layers + 1)
        places = {"resnets": f"{first + layer}.0", "attentions": f"{first + layer}.1"}
        place = places.get(kind, f"{first + layers}.0")
        rest = rest.replace("conv.", "op.", 1) if kind == "downsamplers" else rest
        whole = f"input_blocks.{place}"
    else:
        first = block * (layers + 1)
        places = {"resnets": f"{first + layer}.0", "attentions": f"{first + layer}.1"}
        place = places.get(kind, f"{first + layers}.{2 if with_attention[block] else 1}")
        whole = f"output_blocks.{place}"
    return f"{whole}.{_resnet_part(rest) if kind == 'resnets' else rest}"


def _resnet_part(rest: str) -> str:
    part, _, leaf = rest.rpartition(".")
    return f"{_UNET_RESNET[part]}.{leaf}"


def _vae_name(name: str, levels: int) -> str:
    found = re.match(r"(encoder|decoder)\.(down|up)_blocks\.(\d+)\.(.+)", name)
    if found:
        # The original counts the decoder's levels from the largest picture down.
        level = int(found[3]) if found[2] == "down" else levels - 1 - int(found[3])
        rest = re.sub(r"resnets\.(\d+)\.", r"block.\1.", found[4])
        name = f"{found[1]}.{found[2]}.{level}.{rest}"
    for ours, original in _VAE_PARTS.items():
        name = name.replace(f"{ours}.", f"{original}.")
    return name
