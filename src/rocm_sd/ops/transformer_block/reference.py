"""The definition, in plain torch: every implementation is measured against it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from rocm_sd.ops.attention.reference import attention
from rocm_sd.ops.layer_norm_residual.reference import layer_norm_residual
from rocm_sd.ops.linear_geglu.reference import linear_geglu
from rocm_sd.ops.linear_residual.packing import split_heads
from rocm_sd.ops.linear_residual.reference import linear_residual

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

__all__ = ["Steps", "composed", "transformer_block"]


class Steps(NamedTuple):
    """The ops that a block is composed of, or their definitions."""

    attention: Callable[..., Tensor]
    layer_norm_residual: Callable[..., tuple[Tensor, Tensor]]
    linear_geglu: Callable[..., Tensor]
    linear_residual: Callable[..., Tensor]


def composed(steps: Steps, x: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> Tensor:
    """The steps of rewrite/transformer.py, in its order: the same kernels run, whichever of the two calls them.

    `rest` are the op's other arguments: weight and bias of a norm, of what comes after it, and of what ends the part.
    """
    *itself, norm2, bias2, q_weight, out2, out2_bias, norm3, bias3, gate, gate_bias, ff, ff_bias, eps = rest
    norm1, bias1, qkv_weight, out1, out1_bias = itself
    heads = keys.shape[2]
    h, _ = steps.layer_norm_residual(x, None, norm1, bias1, eps)
    own = split_heads(steps.linear_residual(h, qkv_weight), 3, heads)
    h = steps.linear_residual(steps.attention(*own).flatten(2), out1, out1_bias)
    h, x = steps.layer_norm_residual(h, x, norm2, bias2, eps)
    (q,) = split_heads(steps.linear_residual(h, q_weight), 1, heads)
    h = steps.linear_residual(steps.attention(q, keys, values).flatten(2), out2, out2_bias)
    h, x = steps.layer_norm_residual(h, x, norm3, bias3, eps)
    return steps.linear_residual(steps.linear_geglu(h, gate, gate_bias), ff, ff_bias, x)


def transformer_block(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Attention to itself, attention to the text, gated feed-forward, each after a norm and added to what it read.

    What one step hands to the next is rounded to x's dtype; within a step the arithmetic is float32, or float64 where x
    is.
    """
    steps = Steps(attention, layer_norm_residual, linear_geglu, linear_residual)
    return composed(steps, x, *rest)
