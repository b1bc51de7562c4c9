"""Several linears of one input as one: QKV as one [3C, K] weight, and the text's K and V as one [2C, K].

>>> weight, bias = pack_linears(attention.to_q, attention.to_k, attention.to_v)
>>> q, k, v = split_heads(linear_residual(x, weight, bias), 3, heads)        # views [B, S, H, D]: nothing is copied
"""

from __future__ import annotations

import torch

from rocm_sd.errors import Unsupported

__all__ = ["pack_linears", "split_columns", "split_heads"]


def pack_linears(*linears: torch.nn.Linear | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One weight [N1 + N2 + ..., K] and one bias, or None where no linear has any; a bare weight has no bias.

    A linear without a bias beside one that has one gets zeros, which change nothing. The result is a copy: it does not
    follow later changes of the linears.
    """
    if not linears:
        raise Unsupported("pack_linears", "no linears at all", hint="Give it the linears that share an input.")
    weights = [one if isinstance(one, torch.Tensor) else one.weight for one in linears]
    biases = [None if isinstance(one, torch.Tensor) else one.bias for one in linears]
    first = weights[0]
    for weight in weights:
        if weight.dim() != 2 or weight.shape[1] != first.shape[-1]:
            shapes = ", ".join(str(tuple(w.shape)) for w in weights)
            raise Unsupported("pack_linears", f"weights of shapes {shapes}: all must be [N, K] with one K")
        if (weight.dtype, weight.device) != (first.dtype, first.device):
            kinds = ", ".join(f"{w.dtype} on {w.device}" for w in weights)
            raise Unsupported("pack_linears", f"weights of {kinds}: all must be of one dtype on one device")
    if all(bias is None for bias in biases):
        return torch.cat(weights), None
    filled = [w.new_zeros(w.shape[0]) if b is None else b for w, b in zip(weights, biases, strict=True)]
    return torch.cat(weights), torch.cat(filled)


def split_columns(packed: torch.Tensor, *sizes: int) -> tuple[torch.Tensor, ...]:
    """[..., N1 + N2 + ...] -> views [..., N1], [..., N2], ..., the columns that each packed linear gave."""
    if sum(sizes) != packed.shape[-1]:
        raise Unsupported("split_columns", f"{packed.shape[-1]} columns in parts of {', '.join(map(str, sizes))}")
    return torch.split(packed, list(sizes), dim=-1)


def split_heads(packed: torch.Tensor, parts: int, heads: int) -> tuple[torch.Tensor, ...]:
    """[B, S, parts * H * D] -> `parts` views [B, S, H, D], as attention reads them in place: (q, k, v) or (k, v)."""
    if packed.dim() != 3 or parts < 1 or heads < 1 or packed.shape[-1] % (parts * heads):
        raise Unsupported(
            "split_heads", f"{tuple(packed.shape)} in {parts} parts of {heads} heads: it takes [B, S, parts * H * D]"
        )
    B, S, columns = packed.shape
    return packed.view(B, S, parts, heads, columns // (parts * heads)).unbind(2)
