"""Convolutional blocks of ldm's UNet and VAE: GroupNorm + SiLU as one op, convolutions with the time embedding's and
the shortcut's adds in them, nearest 2x with the convolution after it. Layers are looked at in every call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from rocm_sd.integrations.ldm.rules import BlockRule
from rocm_sd.rewrite.convolutions import (
    plain_convolution,
    plain_convolution_and_add,
    plain_norm_silu,
    unusual,
)
from rocm_sd.rewrite.layers import idle, untouched
from rocm_sd.rewrite.resblock import WORTH_IT_ON_CPU
from rocm_sd.rewrite.sampling import doubles, plain_doubled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rocm_sd.integrations.ldm.policy import HostPolicy

__all__ = ["NORM_OUT", "UNET_RULES", "VAE_CONVOLUTIONAL_RULES", "why_not_convolutions"]

_UNET = "modules.diffusionmodules.openaimodel"
_VAE = "modules.diffusionmodules.model"


def why_not_convolutions(policy: HostPolicy, *layers: Any) -> str | None:
    for layer in layers:
        if not isinstance(layer, nn.Conv2d):
            return "its convolutions are not of two dimensions"
        for_this_job = policy.pads_by_job and layer.padding_mode != "zeros"
        reason = None if for_this_job else unusual(layer)
        if reason is not None:
            return reason
    return None


def _is_norm_act(layers: Any) -> bool:
    return isinstance(layers[0], nn.GroupNorm) and type(layers[1]) is nn.SiLU


def _resblock_why_not(policy: HostPolicy, block: Any) -> str | None:
    if block.use_scale_shift_norm:
        return "its time embedding scales and shifts"
    if getattr(block, "skip_t_emb", False) or getattr(block, "exchange_temb_dims", False) or block.emb_layers is None:
        return "it has no time embedding of one value a channel"
    if len(block.in_layers) != 3 or len(block.out_layers) != 4 or len(block.emb_layers) != 2:
        return "it has other layers than a norm, SiLU and a convolution"
    if not (_is_norm_act(block.in_layers) and _is_norm_act(block.out_layers)):
        return "its norms are not GroupNorm with SiLU"
    return why_not_convolutions(policy, block.in_layers[2], block.out_layers[3])


def _resblock(policy: HostPolicy, block: Any, x: torch.Tensor, emb: torch.Tensor) -> torch.Tensor | None:
    norm1, act1, conv1 = block.in_layers
    norm2, act2, dropout, conv2 = block.out_layers
    act, projection = block.emb_layers
    skip = None if type(block.skip_connection) is nn.Identity else block.skip_connection
    # Torch's kernel that enlarges channels-last maps fails on large batches.
    if x.dim() != 4 or emb.dim() != 2 or (block.updown and len(x) >= 64):
        return None
    if not untouched(block.in_layers, block.out_layers, block.emb_layers, act, act1, act2) or not idle(dropout):
        return None
    if not (policy.all_plain(x, norm1, norm2, projection) and policy.all_taken(x, conv1, conv2, *_given(skip))):
        return None
    hidden = plain_norm_silu(norm1, x)
    if block.updown:
        hidden, x = block.h_upd(hidden), block.x_upd(x)
    # Autocast would bring an embedding of another dtype to this one.
    hidden, later = plain_convolution_and_add(conv1, hidden, block.emb_layers(emb.to(x.dtype)))
    hidden = plain_norm_silu(norm2, hidden, later)
    return plain_convolution(conv2, hidden, residual=x if skip is None else plain_convolution(skip, x))


def _given(*values: Any) -> list[Any]:
    return [value for value in values if value is not None]


def _vae_resblock_why_not(policy: HostPolicy, block: Any) -> str | None:
    if not (isinstance(block.norm1, nn.GroupNorm) and isinstance(block.norm2, nn.GroupNorm)):
        return "its norms are not GroupNorm"
    return why_not_convolutions(policy, block.conv1, block.conv2)


def _vae_resblock(
    policy: HostPolicy, block: Any, x: torch.Tensor, temb: Any = None, *carries: Any, **named: Any
) -> torch.Tensor | None:
    # A video's VAE carries frames from one call to the next.
    if _given(temb, *carries, *named.values()) or x.dim() != 4 or not idle(block.dropout):
        return None
    conv1, conv2, skip = block.conv1, block.conv2, None
    if block.in_channels != block.out_channels:
        skip = block.conv_shortcut if block.use_conv_shortcut else block.nin_shortcut
    if not (policy.all_plain(x, block.norm1, block.norm2) and policy.all_taken(x, conv1, conv2, *_given(skip))):
        return None
    # Named anew at each step: the picture before is then free, which in a VAE is the peak of its memory.
    hidden, later = plain_norm_silu(block.norm1, x), None
    if policy.vae_bias_in_norm:
        hidden, later = plain_convolution_and_add(conv1, hidden, None)
    else:
        hidden = plain_convolution(conv1, hidden)
    hidden = plain_norm_silu(block.norm2, hidden, later)
    return plain_convolution(conv2, hidden, residual=x if skip is None else plain_convolution(skip, x))


def _upsample_why_not(policy: HostPolicy, block: Any) -> str | None:
    if not _has_convolution(block):
        return "it has no convolution"
    if getattr(block, "scale_factor", 2) != 2:
        return f"it enlarges by {block.scale_factor}"
    return why_not_convolutions(policy, block.conv)


def _has_convolution(block: Any) -> bool:
    """A UNet's samplers and a VAE's have two names for it."""
    return bool(block.use_conv if hasattr(block, "use_conv") else block.with_conv)


def _upsample(policy: HostPolicy, block: Any, x: torch.Tensor, output_shape: Any = None) -> torch.Tensor | None:
    if x.dim() != 4 or x.shape[1] != block.channels:
        return None
    return _enlarged(policy, block, x, None if output_shape is None else output_shape[2:])


def _vae_upsample(policy: HostPolicy, block: Any, x: torch.Tensor, *carries: Any, **named: Any) -> torch.Tensor | None:
    return None if x.dim() != 4 or _given(*carries, *named.values()) else _enlarged(policy, block, x, None)


def _enlarged(policy: HostPolicy, block: Any, x: torch.Tensor, size: Sequence[int] | None) -> torch.Tensor | None:
    layer = block.conv
    if getattr(block, "scale_factor", 2) != 2 or not policy.all_taken(x, layer) or not doubles(layer, x, size):
        return None
    return plain_doubled(layer, x)


def _downsample_why_not(policy: HostPolicy, block: Any) -> str | None:
    if not _has_convolution(block):
        return "it has no convolution"
    return why_not_convolutions(policy, block.op if hasattr(block, "op") else block.conv)


def _downsample(policy: HostPolicy, block: Any, x: torch.Tensor) -> torch.Tensor | None:
    known = x.dim() == 4 and x.shape[1] == block.channels and policy.all_taken(x, block.op)
    return plain_convolution(block.op, x) if known else None


def _vae_downsample(
    policy: HostPolicy, block: Any, x: torch.Tensor, *carries: Any, **named: Any
) -> torch.Tensor | None:
    if x.dim() != 4 or _given(*carries, *named.values()) or not policy.all_taken(x, block.conv):
        return None
    # It pads below and to the right only.
    return plain_convolution(block.conv, F.pad(x, (0, 1, 0, 1)))


def _out_why_not(policy: HostPolicy, layers: Any) -> str | None:
    if len(layers) != 3 or not _is_norm_act(layers):
        return "it is not GroupNorm, SiLU and a convolution"
    return why_not_convolutions(policy, layers[2])


def _out(policy: HostPolicy, layers: Any, x: torch.Tensor) -> torch.Tensor | None:
    norm, act, last = layers
    known = x.dim() == 4 and untouched(act) and policy.all_plain(x, norm) and policy.all_taken(x, last)
    return plain_convolution(last, plain_norm_silu(norm, x)) if known else None


_RESBLOCK = "GroupNorm + SiLU as one op; convolutions with the time embedding's and the shortcut's adds in them"
_VAE_RESBLOCK = "GroupNorm + SiLU as one op; the shortcut's add in the second convolution"
_UPSAMPLE = "nearest 2x and the 3x3 convolution after it, in one op where that is faster"
_DOWNSAMPLE = "the convolution of stride 2 by whichever implementation is fastest"

UNET_RULES = (
    BlockRule("resblock", _RESBLOCK, "UNet", _UNET, ("ResBlock",), "conv2d", _resblock_why_not, _resblock,
              worth_it_on_cpu=WORTH_IT_ON_CPU),
    BlockRule("upsample", _UPSAMPLE, "UNet", _UNET, ("Upsample",), "upsample_conv2d", _upsample_why_not, _upsample),
    BlockRule("downsample", _DOWNSAMPLE, "UNet", _UNET, ("Downsample",), "conv2d", _downsample_why_not, _downsample),
)  # fmt: skip
VAE_CONVOLUTIONAL_RULES = (
    BlockRule("vae_resblock", _VAE_RESBLOCK, "VAE", _VAE, ("ResnetBlock",), "conv2d", _vae_resblock_why_not,
              _vae_resblock, worth_it_on_cpu=WORTH_IT_ON_CPU),
    BlockRule("vae_upsample", _UPSAMPLE, "VAE", _VAE, ("Upsample",), "upsample_conv2d", _upsample_why_not,
              _vae_upsample),
    BlockRule("vae_downsample", _DOWNSAMPLE, "VAE", _VAE, ("Downsample",), "conv2d", _downsample_why_not,
              _vae_downsample),
)  # fmt: skip
# Of a host that replaces by path: a Sequential is known by nothing else.
NORM_OUT = BlockRule("norm_out", "the last GroupNorm + SiLU as one op", "UNet", _UNET, (), "group_norm_silu",
                     _out_why_not, _out, path="out")  # fmt: skip
