"""Layers that the UNet is made of."""

from __future__ import annotations

import math

import torch
from torch import nn


class GroupNorm32(nn.GroupNorm):
    def forward(self, x):
        return super().forward(x.float()).type(x.dtype)


def normalization(channels):
    return GroupNorm32(32, channels)


def randomised(module):
    """The original begins these layers with zeros, which would hide what they compute."""
    return module


def timestep_embedding(timesteps, dim, max_period=10000, repeat_only=False):
    assert not repeat_only
    half = dim // 2
    rates = torch.exp(-math.log(max_period) * torch.arange(half, dtype=torch.float32, device=timesteps.device) / half)
    angles = timesteps[:, None].float() * rates[None]
    return torch.cat([angles.cos(), angles.sin()], dim=-1)
