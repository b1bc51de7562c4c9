"""Convolutional blocks of ComfyUI's UNet (SD 1.5, SD 2.1, SDXL): GroupNorm + SiLU as one op, convolutions with the time
embedding's and the shortcut's adds in them, nearest 2x with the convolution after it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rocm_sd.integrations.comfyui.host import is_comfy
from rocm_sd.integrations.comfyui.layers import (
    convolution,
    convolution_and_add,
    doubled,
    idle,
    norm_silu,
    ours,
    takes,
)
from rocm_sd.integrations.comfyui.rules import BlockRule
from rocm_sd.rewrite.convolutions import unusual
from rocm_sd.rewrite.layers import untouched

__all__ = ["RULES"]

_UNET = "ldm.modules.diffusionmodules.openaimodel"


def _flat(layer: Any) -> str | None:
    return unusual(layer) if isinstance(layer, nn.Conv2d) else "its convolutions are not of two dimensions"


def _norm_act(layers: Any) -> bool:
    return isinstance(layers[0], nn.GroupNorm) and type(layers[1]) is nn.SiLU


def _resblock_why_not(block: Any) -> str | None:
    if block.use_scale_shift_norm:
        return "its time embedding scales and shifts"
    if getattr(block, "skip_t_emb", False) or getattr(block, "exchange_temb_dims", False) or block.emb_layers is None:
        return "it has no time embedding of its own"
    if len(block.in_layers) != 3 or len(block.out_layers) != 4:
        return "it has other layers than a norm, SiLU and a convolution"
    if not (_norm_act(block.in_layers) and _norm_act(block.out_layers)):
        return "its norms are not GroupNorm with SiLU"
    return _flat(block.in_layers[2]) or _flat(block.out_layers[3])


def _resblock(self: Any, x: torch.Tensor, emb: torch.Tensor) -> torch.Tensor | None:
    norm, act, first = self.in_layers
    out_norm, out_act, dropout, second = self.out_layers
    if not ours("conv2d", x) or x.dim() != 4 or emb.dim() != 2 or not takes(first, x):
        return None
    if not (untouched(self.in_layers, self.out_layers, act, out_act) and idle(dropout)):
        return None
    h = norm_silu(norm, x)
    if self.updown:
        h, x = self.h_upd(h), self.x_upd(x)
    h, later = convolution_and_add(first, h, self.emb_layers(emb).type(h.dtype))
    h = norm_silu(out_norm, h, later)
    shortcut = x if type(self.skip_connection) is nn.Identity else convolution(self.skip_connection, x)
    return convolution(second, h, shortcut)


def _upsample_why_not(block: Any) -> str | None:
    if not block.use_conv:
        return "it has no convolution"
    return _flat(block.conv)


def _upsample(self: Any, x: torch.Tensor, output_shape: Any = None) -> torch.Tensor | None:
    if not ours("upsample_conv2d", x) or x.dim() != 4 or x.shape[1] != self.channels:
        return None
    # A picture whose size is odd in latents is enlarged to what the other half of the UNet had.
    if output_shape is not None and tuple(output_shape[2:]) != (2 * x.shape[2], 2 * x.shape[3]):
        return None
    return doubled(self.conv, x)


def _downsample_why_not(block: Any) -> str | None:
    if not block.use_conv:
        return "it has no convolution"
    return _flat(block.op)


def _downsample(self: Any, x: torch.Tensor) -> torch.Tensor | None:
    known = ours("conv2d", x) and x.dim() == 4 and x.shape[1] == self.channels and takes(self.op, x)
    return convolution(self.op, x) if known else None


def _is_out(path: str, module: nn.Module) -> bool:
    return path == "out" and type(module) is nn.Sequential


def _out_why_not(layers: Any) -> str | None:
    if len(layers) != 3 or not _norm_act(layers):
        return "it is not GroupNorm, SiLU and a convolution"
    return _flat(layers[2])


def _out(self: Any, x: torch.Tensor) -> torch.Tensor | None:
    norm, act, last = self
    known = ours("group_norm_silu", x) and x.dim() == 4 and takes(last, x) and untouched(act)
    return convolution(last, norm_silu(norm, x)) if known else None


RULES: tuple[BlockRule, ...] = (
    BlockRule(
        "resblock",
        "GroupNorm + SiLU as one op; convolutions with the time embedding's and the shortcut's adds in them",
        lambda _path, module: is_comfy(type(module), "ResBlock", _UNET),
        _resblock_why_not,
        _resblock,
    ),
    BlockRule(
        "upsample",
        "nearest 2x and the 3x3 convolution after it, in one op where that is faster",
        lambda _path, module: is_comfy(type(module), "Upsample", _UNET),
        _upsample_why_not,
        _upsample,
    ),
    BlockRule(
        "downsample",
        "the convolution of stride 2 by whichever implementation is fastest",
        lambda _path, module: is_comfy(type(module), "Downsample", _UNET),
        _downsample_why_not,
        _downsample,
    ),
    BlockRule("norm_out", "the last GroupNorm + SiLU as one op", _is_out, _out_why_not, _out),
)
