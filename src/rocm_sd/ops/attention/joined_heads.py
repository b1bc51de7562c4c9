"""Attention of [B, S, H, D], or of [B, S, H * D] with the number of heads, under the founding documents' names."""

from __future__ import annotations

from typing import Any

import torch

from rocm_sd.errors import Unsupported
from rocm_sd.ops.attention.op import attention, backward
from rocm_sd.ops.defining import Saved
from rocm_sd.tuning.choice import STOCK

__all__ = ["OptimizedAttentionFunction", "optimized_attention", "pytorch_attention_fallback"]

_NAMES = ("q", "k", "v")


def optimized_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    num_heads: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """softmax(scale * q k^T) v of [B, S, H, D], or of [B, S, H * D] with `num_heads`; the result has the query's shape.

    Queries and keys may differ in length. Without `scale` it is D**-0.5.
    """
    q, k, v = _heads("optimized_attention", query, key, value, num_heads)
    return attention(q, k, v, scale).view(query.shape)


def pytorch_attention_fallback(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    num_heads: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """The same by stock torch: what `optimized_attention` falls back to, and is compared with."""
    q, k, v = _heads("pytorch_attention_fallback", query, key, value, num_heads)
    return attention(q, k, v, scale, STOCK).view(query.shape)


class OptimizedAttentionFunction(torch.autograd.Function):
    """`OptimizedAttentionFunction.apply(query, key, value, num_heads=None, scale=None)`: `optimized_attention` with its
    gradients, of which gradients can be asked for, too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        num_heads: int | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.num_heads, ctx.scale = num_heads, scale
        return optimized_attention(query, key, value, num_heads, scale)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        q, k, v = _heads("OptimizedAttentionFunction", query, key, value, ctx.num_heads)
        wanted = {name for name, asked in zip(_NAMES, ctx.needs_input_grad, strict=False) if asked}
        found = backward(Saved({"q": q, "k": k, "v": v, "scale": ctx.scale}, wanted), grads[0].reshape(q.shape))
        parts = zip(map(found.get, _NAMES), (query, key, value), strict=True)
        of_inputs = [None if part is None else part.reshape(given.shape) for part, given in parts]
        return *of_inputs, None, None


def _heads(
    name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, num_heads: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if query.dim() == 4 and num_heads in (None, query.shape[2]):
        return query, key, value
    if query.dim() != 3 or num_heads is None:
        given = f"{query.dim()} dimensions with num_heads={num_heads}"
        raise Unsupported(name, given, hint="Give [B, S, H, D], or [B, S, H * D] with num_heads.")
    if num_heads < 1 or query.shape[2] % num_heads:
        raise Unsupported(name, f"{query.shape[2]} columns in {num_heads} heads")
    for part, tensor in (("key", key), ("value", value)):
        if tensor.dim() != 3 or tensor.shape[2] != query.shape[2]:
            shapes = f"a query of shape {tuple(query.shape)} with a {part} of {tuple(tensor.shape)}"
            raise Unsupported(name, shapes)
    q, k, v = (tensor.reshape(*tensor.shape[:2], num_heads, -1) for tensor in (query, key, value))
    return q, k, v
