"""Models of the real block types with random weights, so small that a call takes milliseconds."""

from __future__ import annotations

import torch
from diffusers import (
    AutoencoderKL,
    ControlNetModel,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    UNet2DModel,
)
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

TEXT = 32
POOLED = 32

_SMALL = {
    "sample_size": 8,
    "in_channels": 4,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "norm_num_groups": 16,
}
_SD15 = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": TEXT,
    "attention_head_dim": 4,
}
# Heads of one size in every level, and linears where 1.5 has convolutions of a point.
_SD21 = _SD15 | {"attention_head_dim": (4, 8), "use_linear_projection": True}
_SDXL = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 2 * TEXT,
    "attention_head_dim": (2, 4),
    "transformer_layers_per_block": (1, 2),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 6 * 8 + POOLED,
}
# One text encoder, and five numbers about the picture: its size, its crop and its score.
_REFINER = _SDXL | {"cross_attention_dim": TEXT, "projection_class_embeddings_input_dim": 5 * 8 + POOLED}
_BY_FAMILY = {"sd15": _SD15, "sd21": _SD21, "sdxl": _SDXL, "refiner": _REFINER}


def unet_of(family: str, **options) -> UNet2DConditionModel:
    return UNet2DConditionModel(**_SMALL | {"out_channels": 4} | _BY_FAMILY[family] | options).eval()


def controlnet_of(family: str, **options) -> ControlNetModel:
    config = _SMALL | _BY_FAMILY[family] | {"conditioning_embedding_out_channels": (16, 32)} | options
    config.pop("sample_size")
    config.pop("up_block_types")
    model = ControlNetModel(**config).eval()
    # They begin as zeros, with which a ControlNet says nothing.
    for layer in (model.controlnet_mid_block, *model.controlnet_down_blocks, model.controlnet_cond_embedding.conv_out):
        nn.init.normal_(layer.weight, std=0.1)
    return model


def unconditional_unet() -> UNet2DModel:
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    return UNet2DModel(**_SMALL | {"in_channels": 3, "out_channels": 3, "attention_head_dim": 8} | blocks).eval()


def vae_of(**options) -> AutoencoderKL:
    config = {
        "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
        "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
        "block_out_channels": (32, 32),
        "latent_channels": 4,
        "norm_num_groups": 16,
        # Otherwise SDXL encodes in float32 whatever the test asks for, float64 too.
        "force_upcast": False,
    }
    return AutoencoderKL(**config | options).eval()


def text_encoder_of(tokenizer: CLIPTokenizer, kind: type = CLIPTextModel) -> CLIPTextModel:
    """`kind`: CLIPTextModel, or CLIPTextModelWithProjection as SDXL's second one is."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT,
        intermediate_size=64,
        projection_dim=POOLED,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return kind(config).eval()


def projected_text_encoder_of(tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    return text_encoder_of(tokenizer, CLIPTextModelWithProjection)


def sd3_transformer() -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=2 * TEXT,
        caption_projection_dim=32,
        pooled_projection_dim=2 * POOLED,
        pos_embed_max_size=16,
    ).eval()


def flux_transformer(**options) -> FluxTransformer2DModel:
    config = {
        "patch_size": 1,
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": TEXT,
        "pooled_projection_dim": POOLED,
        "axes_dims_rope": (4, 4, 8),
    }
    return FluxTransformer2DModel(**config | options).eval()


def lora_of(model: nn.Module, prefix: str, targets: tuple[str, ...], seed: int, rank: int = 2) -> dict:
    """A LoRA file's tensors, strong enough that every picture shows it. `targets` are endings of layers' names.

    Stronger ones would make the model chaotic: a rounding would grow as the steps go on.
    """
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, layer in model.named_modules():
        weight = getattr(layer, "weight", None)
        if not name.endswith(targets) or weight is None:
            continue
        wide, *point = weight.shape[1:]
        down = torch.randn(rank, wide, *point, generator=random)
        up = torch.randn(weight.shape[0], rank, *[1] * len(point), generator=random)
        tensors[f"{prefix}.{name}.lora_A.weight"] = down / weight[0].numel() ** 0.5
        tensors[f"{prefix}.{name}.lora_B.weight"] = up / 8
    assert tensors, f"no layer of {type(model).__name__} ends with {targets}"
    return tensors


def copied(tensors: dict) -> dict:
    """To hand over: PEFT takes tensors as they are for its parameters, and a hot swap writes into them."""
    return {name: tensor.clone() for name, tensor in tensors.items()}
