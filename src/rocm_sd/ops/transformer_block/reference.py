"""The definition, in plain torch: every implementation is measured against it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

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


def composed(
    steps: Steps,
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    norm1_weight: Tensor,
    norm1_bias: Tensor,
    qkv_weight: Tensor,
    out1_weight: Tensor,
    out1_bias: Tensor,
    norm2_weight: Tensor,
    norm2_bias: Tensor,
    q_weight: Tensor,
    out2_weight: Tensor,
    out2_bias: Tensor,
    norm3_weight: Tensor,
    norm3_bias: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    ff_weight: Tensor,
    ff_bias: Tensor,
    eps: float,
) -> Tensor:
    """The steps of rewrite/transformer.py, in its order: the same kernels run, whichever of the two calls them."""
    heads = keys.shape[2]
    h, _ = steps.layer_norm_residual(x, None, norm1_weight, norm1_bias, eps)
    own = split_heads(steps.linear_residual(h, qkv_weight), 3, heads)
    h = steps.linear_residual(steps.attention(*own).flatten(2), out1_weight, out1_bias)
    h, x = steps.layer_norm_residual(h, x, norm2_weight, norm2_bias, eps)
    (q,) = split_heads(steps.linear_residual(h, q_weight), 1, heads)
    h = steps.linear_residual(steps.attention(q, keys, values).flatten(2), out2_weight, out2_bias)
    h, x = steps.layer_norm_residual(h, x, norm3_weight, norm3_bias, eps)
    return steps.linear_residual(steps.linear_geglu(h, gate_weight, gate_bias), ff_weight, ff_bias, x)


def transformer_block(x: torch.Tensor, *rest: torch.Tensor | float) -> torch.Tensor:
    """Attention to itself, attention to the text, gated feed-forward, each after a norm and added to what it read.

    What one step hands to the next is rounded to x's dtype; within a step the arithmetic is float32, or float64 where x
    is.
    """
    steps = Steps(attention, layer_norm_residual, linear_geglu, linear_residual)
    return composed(steps, x, *rest)  # type: ignore[arg-type]  # the eps comes last
