"""A latent diffusion UNet, with the attributes of the one that the host has."""

from __future__ import annotations

import torch as th
import torch.nn.functional as F
from torch import nn

from ..attention import SpatialTransformer  # noqa: TID252 -- under two names, ldm and sgm
from .util import normalization, randomised, timestep_embedding


class TimestepBlock(nn.Module):
    pass


class TimestepEmbedSequential(nn.Sequential, TimestepBlock):
    def forward(self, x, emb, context=None):
        for layer in self:
            if isinstance(layer, TimestepBlock):
                x = layer(x, emb)
            else:
                x = layer(x, context) if isinstance(layer, SpatialTransformer) else layer(x)
        return x


class Upsample(nn.Module):
    def __init__(self, channels, use_conv, dims=2, out_channels=None, padding=1):
        super().__init__()
        self.channels, self.use_conv, self.dims = channels, use_conv, dims
        self.out_channels = out_channels or channels
        if use_conv:
            self.conv = nn.Conv2d(channels, self.out_channels, 3, padding=padding)

    def forward(self, x):
        x = F.interpolate(x, scale_factor=2, mode="nearest")
        return self.conv(x) if self.use_conv else x


class Downsample(nn.Module):
    def __init__(self, channels, use_conv, dims=2, out_channels=None, padding=1):
        super().__init__()
        self.channels, self.use_conv, self.dims = channels, use_conv, dims
        self.out_channels = out_channels or channels
        self.op = nn.Conv2d(channels, self.out_channels, 3, stride=2, padding=padding) if use_conv else nn.AvgPool2d(2)

    def forward(self, x):
        return self.op(x)


class ResBlock(TimestepBlock):
    def __init__(
        self,
        channels,
        emb_channels,
        dropout,
        out_channels=None,
        use_conv=False,
        use_scale_shift_norm=False,
        dims=2,  # noqa: ARG002 -- the signature of the original
        use_checkpoint=False,
        up=False,
        down=False,
    ):
        super().__init__()
        self.channels, self.emb_channels, self.dropout = channels, emb_channels, dropout
        self.out_channels, self.use_conv, self.use_checkpoint = out_channels or channels, use_conv, use_checkpoint
        self.use_scale_shift_norm, self.updown = use_scale_shift_norm, up or down
        self.in_layers = nn.Sequential(
            normalization(channels), nn.SiLU(), nn.Conv2d(channels, self.out_channels, 3, padding=1)
        )
        change = (lambda: Upsample(channels, False)) if up else (lambda: Downsample(channels, False))
        self.h_upd, self.x_upd = (change(), change()) if self.updown else (nn.Identity(), nn.Identity())
        wide = 2 * self.out_channels if use_scale_shift_norm else self.out_channels
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(emb_channels, wide))
        self.out_layers = nn.Sequential(
            normalization(self.out_channels),
            nn.SiLU(),
            nn.Dropout(p=dropout),
            randomised(nn.Conv2d(self.out_channels, self.out_channels, 3, padding=1)),
        )
        same = self.out_channels == channels
        self.skip_connection = nn.Identity() if same else nn.Conv2d(channels, self.out_channels, 1)

    def forward(self, x, emb):
        return self._forward(x, emb)

    def _forward(self, x, emb):
        h = self.in_layers[:-1](x)
        h, x = self.h_upd(h), self.x_upd(x)
        h = self.in_layers[-1](h)
        add = self.emb_layers(emb).type(h.dtype)[..., None, None]
        if self.use_scale_shift_norm:
            scale, shift = th.chunk(add, 2, dim=1)
            h = self.out_layers[1:](self.out_layers[0](h) * (1 + scale) + shift)
        else:
            h = self.out_layers(h + add)
        return self.skip_connection(x) + h


class UNetModel(nn.Module):
    """Two sizes of a picture, one block each, and as many on the way back."""

    def __init__(
        self,
        image_size,
        in_channels,
        model_channels,
        out_channels,
        num_res_blocks,
        attention_resolutions,
        channel_mult=(1, 2),
        use_checkpoint=False,
        num_heads=-1,
        use_spatial_transformer=True,
        transformer_depth=1,
        context_dim=None,
        legacy=False,
        num_classes=None,
        adm_in_channels=None,
        use_linear_in_transformer=False,
    ):
        super().__init__()
        assert tuple(channel_mult) == (1, 2)
        assert num_res_blocks == 1
        assert tuple(attention_resolutions) == (1, 2)
        assert use_spatial_transformer
        assert not legacy
        self.image_size, self.in_channels, self.out_channels = image_size, in_channels, out_channels
        self.model_channels, self.num_classes, self.dtype = model_channels, num_classes, th.float32
        wide, embedding = 2 * model_channels, 4 * model_channels
        self.time_embed = nn.Sequential(
            nn.Linear(model_channels, embedding), nn.SiLU(), nn.Linear(embedding, embedding)
        )  # fmt: skip
        if num_classes is not None:
            self.label_emb = nn.Sequential(
                nn.Sequential(nn.Linear(adm_in_channels, embedding), nn.SiLU(), nn.Linear(embedding, embedding))
            )

        def attention(channels):
            return SpatialTransformer(
                channels, num_heads, channels // num_heads, transformer_depth, context_dim=context_dim,
                use_linear=use_linear_in_transformer, use_checkpoint=use_checkpoint,
            )  # fmt: skip

        def block(given, channels):
            return ResBlock(given, embedding, 0, channels, use_checkpoint=use_checkpoint)

        whole = TimestepEmbedSequential
        self.input_blocks = nn.ModuleList([
            whole(nn.Conv2d(in_channels, model_channels, 3, padding=1)),
            whole(block(model_channels, model_channels), attention(model_channels)),
            whole(Downsample(model_channels, True)),
            whole(block(model_channels, wide), attention(wide)),
        ])  # fmt: skip
        self.middle_block = whole(block(wide, wide), attention(wide), block(wide, wide))
        self.output_blocks = nn.ModuleList([
            whole(block(2 * wide, wide), attention(wide)),
            whole(block(wide + model_channels, wide), attention(wide), Upsample(wide, True)),
            whole(block(wide + model_channels, model_channels), attention(model_channels)),
            whole(block(2 * model_channels, model_channels), attention(model_channels)),
        ])  # fmt: skip
        self.out = nn.Sequential(
            normalization(model_channels),
            nn.SiLU(),
            randomised(nn.Conv2d(model_channels, out_channels, 3, padding=1)),
        )

    def forward(self, x, timesteps=None, context=None, y=None, **kwargs):  # noqa: ARG002 -- the signature of the original
        emb = self.time_embed(timestep_embedding(timesteps, self.model_channels).to(self.time_embed[0].weight.dtype))
        if self.num_classes is not None:
            emb = emb + self.label_emb(y)
        kept, h = [], x.type(self.dtype)
        for module in self.input_blocks:
            h = module(h, emb, context)
            kept.append(h)
        h = self.middle_block(h, emb, context)
        for module in self.output_blocks:
            h = module(th.cat([h, kept.pop()], dim=1), emb, context)
        return self.out(h.type(x.dtype))
