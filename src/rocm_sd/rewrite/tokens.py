"""Tokens [B, S, C] of pictures, and their products with linears that are plain: the caller has asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rocm_sd.ops import linear_residual
from rocm_sd.ops.linear_residual.packing import split_heads
from rocm_sd.rewrite.layers import weight_and_bias
from rocm_sd.rewrite.packing import packed_linear

if TYPE_CHECKING:
    import torch

__all__ = ["map_of", "plain_linear", "projected", "tokens_of"]


def tokens_of(x: torch.Tensor) -> torch.Tensor:
    """[B, C, H, W] -> [B, HW, C]; a view where x is channels-last."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)


def map_of(tokens: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[B, HW, C] -> [B, C, H, W] that is channels-last, of the height and width of `like`."""
    return tokens.reshape(tokens.shape[0], *like.shape[2:], tokens.shape[2]).permute(0, 3, 1, 2)


def plain_linear(layer: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """layer(x) + residual; of a 1x1 convolution on tokens the weight is a view, in either layout."""
    weight, bias = weight_and_bias(layer)
    return linear_residual(x, weight if weight.dim() == 2 else weight.flatten(1), bias, residual)


def projected(x: torch.Tensor, heads: int, *layers: Any, pack: bool = True) -> tuple[torch.Tensor, ...]:
    """[B, S, H, D] of each linear, by one product where `pack` and their weights can be read as one."""
    packed = packed_linear(*layers) if pack and len(layers) > 1 else None
    if packed is not None:
        return split_heads(linear_residual(x, *packed), len(layers), heads)
    columns = [plain_linear(layer, x) for layer in layers]
    return tuple(y.reshape(*y.shape[:-1], heads, y.shape[-1] // heads) for y in columns)
