"""Small transformers of SD3 and Flux, what they are given, and the rules of their blocks."""

from __future__ import annotations

import pytest
import torch
from diffusers import FluxTransformer2DModel, SD3Transformer2DModel
from torch import nn

from rocm_sd.rewrite import apply, flux_transformer, joint_transformer
from transformer_blocks import draw

RULES = [joint_transformer.RULE, flux_transformer.RULE, flux_transformer.SINGLE]
C, HEADS, TEXT = 32, 2, 24
WORDS, TOKENS = 5, 24

MODELS = {
    "SD3": {},
    "SD3.5": {"qk_norm": "rms_norm", "dual_attention_layers": (0, 1)},
    "SD3.5 large": {"qk_norm": "rms_norm"},
    "Flux schnell": {},
    "Flux dev": {"guidance_embeds": True},
}
ONE_OF_EACH = ["SD3.5", "Flux dev"]
each_model = pytest.mark.parametrize("name", ONE_OF_EACH)


def is_flux(name: str) -> bool:
    return name.startswith("Flux")


def model(name: str, **options) -> nn.Module:
    torch.manual_seed(0)
    shared = {
        "in_channels": 4,
        "num_layers": 3,
        "attention_head_dim": C // HEADS,
        "num_attention_heads": HEADS,
        "joint_attention_dim": TEXT,
        "pooled_projection_dim": 20,
    } | MODELS[name]
    if is_flux(name):
        built = FluxTransformer2DModel(**shared | {"num_single_layers": 3, "axes_dims_rope": (4, 6, 6)} | options)
    else:
        sizes = {"sample_size": 16, "out_channels": 4, "caption_projection_dim": C, "pos_embed_max_size": 16}
        built = SD3Transformer2DModel(**shared | sizes | options)
    for path, parameter in built.named_parameters():
        # Fresh norms are 1, and would hide a weight that is not used.
        if ".norm_" in path:
            nn.init.normal_(parameter, mean=0.5)
    return built.eval()


def given(name: str, dtype: torch.dtype = torch.float32, batch: int = 2) -> dict:
    """What a pipeline hands over in one step."""
    found = {
        "encoder_hidden_states": draw(batch, WORDS, TEXT, seed=2, dtype=dtype),
        "pooled_projections": draw(batch, 20, seed=3, dtype=dtype),
        "return_dict": False,
    }
    if not is_flux(name):
        timestep = torch.linspace(300, 200, batch)
        return found | {"hidden_states": draw(batch, 4, 8, 12, dtype=dtype), "timestep": timestep}
    rows = torch.arange(TOKENS)
    found |= {
        "hidden_states": draw(batch, TOKENS, 4, dtype=dtype),
        "timestep": torch.linspace(0.3, 0.2, batch).to(dtype),
        "img_ids": torch.stack([torch.zeros(TOKENS), rows // 6, rows % 6], dim=1),
        "txt_ids": torch.zeros(WORDS, 3),
    }
    return found | ({"guidance": torch.full((batch,), 3.5)} if "dev" in name else {})


def block_given(name: str, dtype: torch.dtype = torch.float32, batch: int = 2) -> dict:
    """What a model hands to one of its blocks."""
    found = {
        "hidden_states": draw(batch, TOKENS, C, dtype=dtype),
        "encoder_hidden_states": draw(batch, WORDS, C, seed=2, dtype=dtype),
        "temb": draw(batch, C, seed=3, dtype=dtype),
    }
    if is_flux(name):
        ids = torch.cat([torch.zeros(WORDS, 3), given(name)["img_ids"]])
        found["image_rotary_emb"] = model(name).pos_embed(ids)
    return found


def replaced(module: nn.Module) -> list:
    changes = apply(module, RULES)
    assert changes
    assert all(c.replaced for c in changes), [c.why_skipped for c in changes]
    return changes


def near(ours, expected) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
