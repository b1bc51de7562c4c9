"""The transformer of a latent diffusion UNet, with the attributes of the one that the host has."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .diffusionmodules.util import randomised


class GEGLU(nn.Module):
    def __init__(self, dim_in, dim_out):
        super().__init__()
        self.proj = nn.Linear(dim_in, dim_out * 2)

    def forward(self, x):
        value, gate = self.proj(x).chunk(2, dim=-1)
        return value * F.gelu(gate)


class FeedForward(nn.Module):
    def __init__(self, dim, dim_out=None, mult=4, glu=False, dropout=0.0):
        super().__init__()
        assert glu
        self.net = nn.Sequential(
            GEGLU(dim, dim * mult), nn.Dropout(dropout), nn.Linear(dim * mult, dim if dim_out is None else dim_out)
        )

    def forward(self, x):
        return self.net(x)


class CrossAttention(nn.Module):
    def __init__(self, query_dim, context_dim=None, heads=8, dim_head=64, dropout=0.0):
        super().__init__()
        inner = dim_head * heads
        self.scale, self.heads = dim_head**-0.5, heads
        self.to_q = nn.Linear(query_dim, inner, bias=False)
        self.to_k = nn.Linear(context_dim or query_dim, inner, bias=False)
        self.to_v = nn.Linear(context_dim or query_dim, inner, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner, query_dim), nn.Dropout(dropout))

    def forward(self, x, context=None, mask=None):
        assert mask is None
        text = x if context is None else context
        split = [
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y in (self.to_q(x), self.to_k(text), self.to_v(text))
        ]  # fmt: skip
        q, k, v = split
        weights = (torch.einsum("bhid,bhjd->bhij", q.float(), k.float()) * self.scale).softmax(dim=-1)
        out = torch.einsum("bhij,bhjd->bhid", weights.to(v.dtype), v)
        return self.to_out(out.transpose(1, 2).flatten(2))


class BasicTransformerBlock(nn.Module):
    def __init__(
        self,
        dim,
        n_heads,
        d_head,
        dropout=0.0,
        context_dim=None,
        gated_ff=True,
        checkpoint=True,
        disable_self_attn=False,
    ):
        super().__init__()
        self.disable_self_attn = disable_self_attn
        self.attn1 = CrossAttention(dim, context_dim if disable_self_attn else None, n_heads, d_head, dropout)
        self.ff = FeedForward(dim, dropout=dropout, glu=gated_ff)
        self.attn2 = CrossAttention(dim, context_dim, n_heads, d_head, dropout)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.checkpoint = checkpoint

    def forward(self, x, context=None):
        return self._forward(x, context)

    def _forward(self, x, context=None):
        x = self.attn1(self.norm1(x), context=context if self.disable_self_attn else None) + x
        x = self.attn2(self.norm2(x), context=context) + x
        return self.ff(self.norm3(x)) + x


class SpatialTransformer(nn.Module):
    def __init__(
        self,
        in_channels,
        n_heads,
        d_head,
        depth=1,
        dropout=0.0,
        context_dim=None,
        disable_self_attn=False,
        use_linear=False,
        use_checkpoint=True,
    ):
        super().__init__()
        inner = n_heads * d_head
        self.in_channels, self.use_linear = in_channels, use_linear
        self.norm = nn.GroupNorm(32, in_channels, eps=1e-6)
        self.proj_in = nn.Linear(in_channels, inner) if use_linear else nn.Conv2d(in_channels, inner, 1)
        self.transformer_blocks = nn.ModuleList(
            BasicTransformerBlock(
                inner, n_heads, d_head, dropout, context_dim, checkpoint=use_checkpoint,
                disable_self_attn=disable_self_attn,
            )
            for _ in range(depth)
        )  # fmt: skip
        self.proj_out = randomised(
            nn.Linear(inner, in_channels) if use_linear else nn.Conv2d(inner, in_channels, 1)
        )  # fmt: skip

    def forward(self, x, context=None):
        context = context if isinstance(context, list) else [context]
        height, width = x.shape[2:]
        before = x
        x = self.norm(x)
        x = x if self.use_linear else self.proj_in(x)
        x = x.flatten(2).transpose(1, 2)
        x = self.proj_in(x) if self.use_linear else x
        for number, block in enumerate(self.transformer_blocks):
            x = block(x, context=context[number])
        x = self.proj_out(x) if self.use_linear else x
        x = x.transpose(1, 2).unflatten(2, (height, width))
        return (x if self.use_linear else self.proj_out(x)) + before
