"""The first stage of latent diffusion, with the attributes of the one that the host has."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def nonlinearity(x):
    return x * torch.sigmoid(x)


def _norm(channels):
    return nn.GroupNorm(32, channels, eps=1e-6)


class Upsample(nn.Module):
    def __init__(self, in_channels, with_conv):
        super().__init__()
        self.with_conv = with_conv
        if with_conv:
            self.conv = nn.Conv2d(in_channels, in_channels, 3, padding=1)

    def forward(self, x):
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        return self.conv(x) if self.with_conv else x


class Downsample(nn.Module):
    def __init__(self, in_channels, with_conv):
        super().__init__()
        self.with_conv = with_conv
        if with_conv:
            self.conv = nn.Conv2d(in_channels, in_channels, 3, stride=2)

    def forward(self, x):
        return self.conv(F.pad(x, (0, 1, 0, 1))) if self.with_conv else F.avg_pool2d(x, 2)


class ResnetBlock(nn.Module):
    def __init__(self, *, in_channels, out_channels=None, conv_shortcut=False, dropout, temb_channels=512):
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels or in_channels
        self.use_conv_shortcut = conv_shortcut
        self.norm1, self.norm2 = _norm(in_channels), _norm(self.out_channels)
        self.conv1 = nn.Conv2d(in_channels, self.out_channels, 3, padding=1)
        if temb_channels > 0:
            self.temb_proj = nn.Linear(temb_channels, self.out_channels)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(self.out_channels, self.out_channels, 3, padding=1)
        if self.in_channels != self.out_channels:
            if conv_shortcut:
                self.conv_shortcut = nn.Conv2d(in_channels, self.out_channels, 3, padding=1)
            else:
                self.nin_shortcut = nn.Conv2d(in_channels, self.out_channels, 1)

    def forward(self, x, temb):
        h = self.conv1(nonlinearity(self.norm1(x)))
        if temb is not None:
            h = h + self.temb_proj(nonlinearity(temb))[:, :, None, None]
        h = self.conv2(self.dropout(nonlinearity(self.norm2(h))))
        if self.in_channels != self.out_channels:
            x = self.conv_shortcut(x) if self.use_conv_shortcut else self.nin_shortcut(x)
        return x + h


class AttnBlock(nn.Module):
    def __init__(self, in_channels):
        super().__init__()
        self.in_channels = in_channels
        self.norm = _norm(in_channels)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(in_channels, in_channels, 1) for _ in range(4))

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (layer(h).flatten(2) for layer in (self.q, self.k, self.v))
        weights = (torch.bmm(q.transpose(1, 2), k) * x.shape[1] ** -0.5).softmax(dim=2)
        return x + self.proj_out(torch.bmm(v, weights.transpose(1, 2)).reshape(x.shape))
