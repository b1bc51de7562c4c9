"""Arguments for one call of each small model, in float64 and different for every sample; and how results compare."""

from __future__ import annotations

import torch
from accelerate.hooks import CpuOffload, add_hook_to_module
from torch.utils._pytree import tree_leaves

from tiny_models import POOLED, TEXT


def values(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def unet_inputs(batch=2, text=TEXT):
    return {"sample": values(batch, 4, 8, 8), "timestep": 7, "encoder_hidden_states": values(batch, 5, text)}


def sdxl_inputs(batch=4):
    added = {"text_embeds": values(batch, POOLED), "time_ids": values(batch, 6)}
    times = torch.arange(batch)
    return unet_inputs(batch, 2 * TEXT) | {"added_cond_kwargs": added, "timestep": times}


def residuals(batch=2):
    """Of the shapes that a ControlNet adds to the small UNet, and different for every sample."""
    shapes = [(32, 8), (32, 8), (32, 4), (64, 4)]
    down = [values(batch, channels, side, side) for channels, side in shapes]
    return {"down_block_additional_residuals": down, "mid_block_additional_residual": values(batch, 64, 4, 4)}


def control_inputs(batch=2):
    return unet_inputs(batch) | {"controlnet_cond": values(batch, 3, 16, 16), "conditioning_scale": 0.7}


def sd3_inputs(batch=2):
    return {
        "hidden_states": values(batch, 4, 16, 16),
        "encoder_hidden_states": values(batch, 5, 2 * TEXT),
        "pooled_projections": values(batch, 2 * POOLED),
        "timestep": torch.full((batch,), 300.0, dtype=torch.float64),
        "block_controlnet_hidden_states": [values(batch, 64, 32)],
    }


def flux_inputs(batch=2):
    return {
        "hidden_states": values(batch, 16, 16),
        "encoder_hidden_states": values(batch, 5, TEXT),
        "pooled_projections": values(batch, POOLED),
        "timestep": torch.full((batch,), 0.3, dtype=torch.float64),
        "guidance": torch.linspace(1, 4, batch, dtype=torch.float64),
        "img_ids": values(16, 3),
        "txt_ids": values(5, 3),
        "joint_attention_kwargs": {},
    }


def doubled(model):
    return model.to(torch.float64).requires_grad_(requires_grad=False)


def notes(installed):
    return " | ".join(installed.notes())


def same(ours, stock):
    """Equal but for the order of sums; other samples' values would differ in the first digits."""
    ours, stock = tree_leaves(ours), tree_leaves(stock)
    assert len(ours) == len(stock)
    for mine, theirs in zip(ours, stock, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def offload_hook(model, device="cpu"):
    add_hook_to_module(model, CpuOffload(execution_device=device), append=True)
