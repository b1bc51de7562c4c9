"""ResBlock, Upsample and Downsample of the UNet in ldm and sgm. Weights and attributes are looked at in every call."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rocm_sd.integrations.a1111.enlarging import enlarged
from rocm_sd.integrations.a1111.guarding import STOCK, guarded
from rocm_sd.integrations.a1111.plain_layers import all_plain, idle, is_of, norm_silu
from rocm_sd.rewrite.apply import Rule
from rocm_sd.rewrite.convolutions import convolution, convolution_and_add, takes, through_op
from rocm_sd.rewrite.layers import untouched
from rocm_sd.rewrite.resblock import WORTH_IT_ON_CPU

__all__ = ["RULES"]


def _is_resblock(module: nn.Module) -> bool:
    return is_of(module, "ResBlock")


def _resblock_why_not(module: Any) -> str | None:
    if module.use_scale_shift_norm:
        return "its time embedding scales and shifts"
    if getattr(module, "skip_t_emb", False) or getattr(module, "exchange_temb_dims", False):
        return "it has no time embedding of one value a channel"
    if len(module.in_layers) != 3 or len(module.out_layers) != 4 or len(module.emb_layers) != 2:
        return "it has other layers than a norm, an activation and a convolution"
    if type(module.in_layers[1]) is not nn.SiLU or type(module.out_layers[1]) is not nn.SiLU:
        return "its activation is not SiLU"
    if not isinstance(module.in_layers[2], nn.Conv2d):
        return "its convolutions are not of pictures"
    return None


@guarded("The UNet's ResBlock", lambda block: block.in_layers[0].weight)
def _resblock(self: Any, x: torch.Tensor, emb: torch.Tensor) -> Any:
    norm1, _, conv1 = self.in_layers
    norm2, _, dropout, conv2 = self.out_layers
    activation, projection = self.emb_layers
    skip = self.skip_connection
    if x.dim() != 4 or (x.numel() < WORTH_IT_ON_CPU and not through_op("conv2d", x)):
        return STOCK
    if not (all_plain(x, norm1, norm2, projection) and takes(conv1, x) and takes(conv2, x) and idle(dropout)):
        return STOCK
    if not untouched(self.in_layers, self.out_layers, self.emb_layers, activation):
        return STOCK
    if type(skip) is not nn.Identity and not takes(skip, x):
        return STOCK
    hidden = norm_silu(norm1, x)
    if self.updown:
        hidden, x = self.h_upd(hidden), self.x_upd(x)
    # Autocast would bring an embedding of another dtype to this one.
    add = projection(F.silu(emb.to(x.dtype)))
    hidden, later = convolution_and_add(conv1, hidden, add)
    hidden = norm_silu(norm2, hidden, later)
    shortcut = x if type(skip) is nn.Identity else convolution(skip, x)
    return convolution(conv2, hidden, residual=shortcut)


def _has_convolution(module: Any, name: str) -> str | None:
    return None if isinstance(getattr(module, name, None), nn.Conv2d) else "it has no convolution"


def _is_upsample(module: nn.Module) -> bool:
    return is_of(module, "Upsample") and hasattr(module, "use_conv")


@guarded("The UNet's Upsample", lambda block: block.conv.weight)
def _upsample(self: Any, x: torch.Tensor) -> Any:
    if x.dim() != 4 or x.shape[1] != self.channels or getattr(self, "scale_factor", 2) != 2:
        return STOCK
    return enlarged(self.conv, x)


def _is_downsample(module: nn.Module) -> bool:
    return is_of(module, "Downsample") and hasattr(module, "use_conv")


@guarded("The UNet's Downsample", lambda block: block.op.weight)
def _downsample(self: Any, x: torch.Tensor) -> Any:
    if x.dim() != 4 or x.shape[1] != self.channels or not through_op("conv2d", x) or not takes(self.op, x):
        return STOCK
    return convolution(self.op, x)


RULES = (
    Rule("resblock", "GroupNorm + SiLU as one op, adds inside the convolutions", True, _is_resblock,
         _resblock_why_not, _resblock),
    Rule("upsample", "nearest 2x and the convolution after it", True, _is_upsample,
         lambda module: _has_convolution(module, "conv"), _upsample, on_cpu=False),
    Rule("downsample", "the convolution of stride 2 by whichever implementation is fastest", True, _is_downsample,
         lambda module: _has_convolution(module, "op"), _downsample, on_cpu=False),
)  # fmt: skip
