"""What the block forwards share: layers that are nothing but their weights, and work done through those weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rocm_sd.ops import attention, group_norm_silu, linear_residual
from rocm_sd.ops.linear_residual.packing import split_heads
from rocm_sd.rewrite.convolutions import of_kind, through_op
from rocm_sd.rewrite.layers import is_plain, untouched
from rocm_sd.rewrite.packing import packed_linear

__all__ = ["all_plain", "attend", "idle", "is_of", "linear", "norm_silu", "project", "to_map", "to_tokens"]


def is_of(module: nn.Module, *names: str) -> bool:
    """By name: ldm and sgm are the host's."""
    kind = type(module)
    return kind.__name__ in names and kind.__module__.partition(".")[0] in ("ldm", "sgm")


def all_plain(x: torch.Tensor, *layers: Any) -> bool:
    """Whether each layer is a linear, a convolution or a norm of x's dtype and device that nobody has touched, now."""
    return all(_is_norm(layer, x) or (is_plain(layer) and of_kind(layer.weight, x)) for layer in layers)


def _is_norm(layer: Any, x: torch.Tensor) -> bool:
    # GroupNorm32 computes in float32 and answers in x's dtype, as the op does.
    if type(layer) not in (nn.GroupNorm, nn.LayerNorm) and not is_of(layer, "GroupNorm32"):
        return False
    return untouched(layer) and (layer.weight is None or of_kind(layer.weight, x))


def idle(*dropouts: Any) -> bool:
    return all(type(d) is nn.Dropout and not (d.training and d.p) and untouched(d) for d in dropouts)


def norm_silu(norm: Any, x: torch.Tensor, add: torch.Tensor | None = None, *, silu: bool = True) -> torch.Tensor:
    """silu(norm(x + add)) of a plain norm; add: [N, C]."""
    if through_op("group_norm_silu", x):
        return group_norm_silu(x, norm.num_groups, norm.weight, norm.bias, add, norm.eps, silu)
    x = x if add is None else x + add[:, :, None, None]
    y = F.group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps)
    return F.silu(y, inplace=True) if silu else y


def linear(layer: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """layer(x) + residual of a plain linear, or of a 1x1 convolution on tokens."""
    return linear_residual(x, layer.weight.flatten(1), layer.bias, residual)


def project(x: torch.Tensor, heads: int, *layers: Any) -> tuple[torch.Tensor, ...]:
    """[B, S, H, D] of each plain linear, by one product where their weights can be read as one."""
    packed = packed_linear(*layers) if len(layers) > 1 else None
    if packed is not None:
        return split_heads(linear_residual(x, *packed), len(layers), heads)
    columns = [linear(layer, x) for layer in layers]
    return tuple(y.reshape(*y.shape[:-1], heads, y.shape[-1] // heads) for y in columns)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, out: Any, residual: torch.Tensor | None
) -> torch.Tensor:
    """out(softmax(scale q k^T) v) + residual."""
    return linear(out, attention(q, k, v, scale).flatten(2), residual)


def to_tokens(x: torch.Tensor) -> torch.Tensor:
    """[B, C, H, W] -> [B, HW, C]; a view where x is channels-last."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)


def to_map(tokens: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[B, HW, C] -> [B, C, H, W] that is channels-last, of the height and width of `like`."""
    return tokens.reshape(len(tokens), *like.shape[2:], tokens.shape[2]).permute(0, 3, 1, 2)
