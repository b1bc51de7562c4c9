"""Blocks of ComfyUI's VAE of Stable Diffusion: norms with SiLU, convolutions with the residual in them, attention over
the pixels without layout copies.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rocm_sd.integrations.comfyui.host import is_comfy
from rocm_sd.integrations.comfyui.layers import (
    convolution,
    doubled,
    idle,
    is_plain,
    linear,
    map_of,
    norm_silu,
    ours,
    takes,
    tokens_of,
)
from rocm_sd.integrations.comfyui.rules import BlockRule
from rocm_sd.ops import attention
from rocm_sd.rewrite.convolutions import unusual

__all__ = ["RULES"]

_VAE = "ldm.modules.diffusionmodules.model"


def _flat(*layers: Any) -> str | None:
    for layer in layers:
        reason = unusual(layer) if isinstance(layer, nn.Conv2d) else "its convolutions are not of two dimensions"
        if reason is not None:
            return reason
    return None


def _resnet_why_not(block: Any) -> str | None:
    if not (isinstance(block.norm1, nn.GroupNorm) and isinstance(block.norm2, nn.GroupNorm)):
        return "its norms are not GroupNorm"
    return _flat(block.conv1, block.conv2)


def _resnet(self: Any, x: torch.Tensor, temb: Any = None, *carries: Any, **named: Any) -> torch.Tensor | None:
    # A video's VAE carries frames from one call to the next.
    if temb is not None or _given(carries, named) or not ours("conv2d", x) or x.dim() != 4:
        return None
    if not takes(self.conv1, x) or not idle(self.dropout):
        return None
    # Named anew at each step: the picture before is then free, which in a VAE is the peak of its memory.
    h = norm_silu(self.norm1, x)
    h = convolution(self.conv1, h)
    h = norm_silu(self.norm2, h)
    if self.in_channels != self.out_channels:
        x = convolution(self.conv_shortcut if self.use_conv_shortcut else self.nin_shortcut, x)
    return convolution(self.conv2, h, x)


def _given(carries: tuple[Any, ...], named: dict[str, Any]) -> bool:
    return any(one is not None for one in (*carries, *named.values()))


def _attention_why_not(block: Any) -> str | None:
    if not isinstance(block.norm, nn.GroupNorm):
        return "its norm is not GroupNorm"
    layers = (block.q, block.k, block.v, block.proj_out)
    reason = _flat(*layers)
    return reason or (None if all(one.kernel_size == (1, 1) for one in layers) else "its projections are not 1x1")


def _attention(self: Any, x: torch.Tensor) -> torch.Tensor | None:
    if not ours("attention", x) or x.dim() != 4:
        return None
    if not all(is_plain(layer, x) for layer in (self.norm, self.q, self.k, self.v, self.proj_out)):
        return None
    tokens = tokens_of(norm_silu(self.norm, x, silu=False))
    q, k, v = (linear(layer, tokens).unsqueeze(2) for layer in (self.q, self.k, self.v))
    return map_of(linear(self.proj_out, attention(q, k, v).flatten(2), tokens_of(x)), *x.shape[2:])


def _upsample_why_not(block: Any) -> str | None:
    if not block.with_conv:
        return "it has no convolution"
    if getattr(block, "scale_factor", 2.0) != 2:
        return f"it enlarges by {block.scale_factor}"
    return _flat(block.conv)


def _upsample(self: Any, x: torch.Tensor, *carries: Any, **named: Any) -> torch.Tensor | None:
    if _given(carries, named) or not ours("upsample_conv2d", x) or x.dim() != 4:
        return None
    return doubled(self.conv, x)


def _downsample_why_not(block: Any) -> str | None:
    if not block.with_conv:
        return "it has no convolution"
    return _flat(block.conv)


def _downsample(self: Any, x: torch.Tensor, *carries: Any, **named: Any) -> torch.Tensor | None:
    if _given(carries, named) or not ours("conv2d", x) or x.dim() != 4 or not takes(self.conv, x):
        return None
    # It pads below and to the right only.
    return convolution(self.conv, F.pad(x, (0, 1, 0, 1)))


RULES: tuple[BlockRule, ...] = (
    BlockRule(
        "vae_resblock",
        "GroupNorm + SiLU as one op; the shortcut's add in the second convolution",
        lambda _path, module: is_comfy(type(module), "ResnetBlock", _VAE),
        _resnet_why_not,
        _resnet,
    ),
    BlockRule(
        "vae_attention",
        "attention over a picture's pixels with no layout copies, the residual in the output projection",
        lambda _path, module: is_comfy(type(module), "AttnBlock", _VAE),
        _attention_why_not,
        _attention,
        slices=True,
    ),
    BlockRule(
        "vae_upsample",
        "nearest 2x and the 3x3 convolution after it, in one op where that is faster",
        lambda _path, module: is_comfy(type(module), "Upsample", _VAE),
        _upsample_why_not,
        _upsample,
    ),
    BlockRule(
        "vae_downsample",
        "the convolution of stride 2 by whichever implementation is fastest",
        lambda _path, module: is_comfy(type(module), "Downsample", _VAE),
        _downsample_why_not,
        _downsample,
    ),
)
