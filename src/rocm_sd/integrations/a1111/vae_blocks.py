"""ResnetBlock, AttnBlock, Upsample and Downsample of the first stage in ldm and sgm."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rocm_sd.integrations.a1111.enlarging import enlarged
from rocm_sd.integrations.a1111.guarding import STOCK, guarded
from rocm_sd.integrations.a1111.permission import PERMISSION
from rocm_sd.integrations.a1111.plain_layers import (
    all_plain,
    attend,
    idle,
    is_of,
    linear,
    norm_silu,
    to_map,
    to_tokens,
)
from rocm_sd.rewrite.apply import Rule
from rocm_sd.rewrite.convolutions import convolution, convolution_and_add, takes, through_op
from rocm_sd.rewrite.resblock import WORTH_IT_ON_CPU

__all__ = ["RULES"]


@guarded("The VAE's ResnetBlock", lambda block: block.norm1.weight, unet=False)
def _resnet(self: Any, x: torch.Tensor, temb: torch.Tensor | None) -> Any:
    conv1, conv2 = self.conv1, self.conv2
    if temb is not None or x.dim() != 4 or (x.numel() < WORTH_IT_ON_CPU and not through_op("conv2d", x)):
        return STOCK
    if not (all_plain(x, self.norm1, self.norm2) and takes(conv1, x) and takes(conv2, x) and idle(self.dropout)):
        return STOCK
    name = "conv_shortcut" if self.use_conv_shortcut else "nin_shortcut"
    skip = getattr(self, name) if self.in_channels != self.out_channels else None
    if skip is not None and not takes(skip, x):
        return STOCK
    # Named anew at each step: the picture before is then free, which here is the peak of the memory.
    hidden = norm_silu(self.norm1, x)
    hidden, later = convolution_and_add(conv1, hidden, None)
    hidden = norm_silu(self.norm2, hidden, later)
    return convolution(conv2, hidden, residual=x if skip is None else convolution(skip, x))


@guarded("The VAE's attention", lambda block: block.norm.weight, unet=False)
def _attention(self: Any, x: torch.Tensor) -> Any:
    layers = (self.q, self.k, self.v, self.proj_out)
    if not PERMISSION.attention or x.dim() != 4 or not x.numel() or not all_plain(x, self.norm, *layers):
        return STOCK
    tokens = to_tokens(norm_silu(self.norm, x, silu=False))
    q, k, v = (linear(layer, tokens)[:, :, None] for layer in layers[:3])
    return to_map(attend(q, k, v, None, self.proj_out, to_tokens(x)), x)


def _attention_why_not(module: Any) -> str | None:
    for name in ("q", "k", "v", "proj_out"):
        layer = getattr(module, name)
        if not isinstance(layer, nn.Conv2d) or layer.kernel_size != (1, 1) or layer.stride != (1, 1):
            return f"its {name} is not a convolution of one point"
    return None


def _is_sampler(module: nn.Module, name: str) -> bool:
    return is_of(module, name) and hasattr(module, "with_conv")


def _sampler_why_not(module: Any) -> str | None:
    return None if module.with_conv and isinstance(module.conv, nn.Conv2d) else "it has no convolution"


@guarded("The VAE's Upsample", lambda block: block.conv.weight, unet=False)
def _upsample(self: Any, x: torch.Tensor) -> Any:
    return enlarged(self.conv, x) if x.dim() == 4 else STOCK


@guarded("The VAE's Downsample", lambda block: block.conv.weight, unet=False)
def _downsample(self: Any, x: torch.Tensor) -> Any:
    if x.dim() != 4 or not through_op("conv2d", x) or not takes(self.conv, x):
        return STOCK
    return convolution(self.conv, F.pad(x, (0, 1, 0, 1)))


RULES = (
    Rule("vae_resblock", "GroupNorm + SiLU as one op, adds inside the convolutions", True,
         lambda module: is_of(module, "ResnetBlock"), lambda _: None, _resnet),
    Rule("vae_attention", "attention over a picture's pixels with no layout copies", True,
         lambda module: is_of(module, "AttnBlock", "MemoryEfficientAttnBlock"), _attention_why_not, _attention,
         on_cpu=False),
    Rule("vae_upsample", "nearest 2x and the convolution after it", True,
         lambda module: _is_sampler(module, "Upsample"), _sampler_why_not, _upsample, on_cpu=False),
    Rule("vae_downsample", "the convolution of stride 2 by whichever implementation is fastest", True,
         lambda module: _is_sampler(module, "Downsample"), _sampler_why_not, _downsample, on_cpu=False),
)  # fmt: skip
