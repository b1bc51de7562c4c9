"""Which attention is the op's: what Diffusers' backend and its processors hand over, and what they keep for stock."""

from __future__ import annotations

import logging
import math
from functools import lru_cache

import torch
import torch.nn.functional as F

from rocm_sd.ops import attention

__all__ = ["attend", "stock_scale", "tell_once", "why_stock"]

log = logging.getLogger("rocm_sd")

_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """softmax(q k^T / sqrt(D) + mask) v; q: [B, S, H, D]; k, v: [B, T, H, D]; mask: [B, H, S or 1, T] or None.

    out: [B, S, H, D] in the dtype that stock answers in.
    """
    reason = "a mask" if mask is not None else why_stock(q, k, v)
    if reason is None:
        return attention(q, k, v, stock_scale(q))
    tell_once("An attention processor", reason)
    heads = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2)


def stock_scale(q: torch.Tensor) -> float:
    """As torch computes it: D**-0.5 is another number in the last bit, which is seen in float64."""
    return 1 / math.sqrt(q.shape[-1])


def why_stock(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """The reason that the op is not for these tensors, now; None: it is."""
    # Asked for each attention, and written to take 3 us.
    if not (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN):
        return "tensors that are sharded or quantised"
    reason = _unlike(q, k, v)
    if reason is None and torch.is_autocast_enabled(q.device.type):
        reason = "autocast, which decides about the dtype itself"
    # The op's backward computes attention once more, which stock's does not.
    if reason is None and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        reason = "gradients"
    return reason


def _unlike(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    queries, keys = q.shape, k.shape
    if len(queries) != 4 or len(keys) != 4 or keys != v.shape or 0 in keys:
        return "keys and values of other shapes than [batch, tokens, heads, columns]"
    if keys[0] != queries[0] or keys[2:] != queries[2:]:
        return "keys of another batch, or of fewer heads than the queries"
    dtype, device = q.dtype, q.device
    if dtype not in _DTYPES or k.dtype != dtype or v.dtype != dtype:
        return f"a dtype of {dtype} with {k.dtype} and {v.dtype}"
    if k.device != device or v.device != device or device.type == "meta":
        return "tensors on several devices, or without data"
    return None


def tell_once(who: str, reason: str) -> None:
    # Inside of a traced graph a message would break it in two.
    if not torch.compiler.is_compiling():
        _tell(who, reason)


@lru_cache(maxsize=256)
def _tell(who: str, reason: str) -> None:
    log.info("%s leaves attention to stock torch: %s.", who, reason)
