"""Inputs whose channels lie in two tensors, as if they had been joined: x, and what is `beside` it."""

from __future__ import annotations

import torch

from rocm_sd.errors import Unsupported

__all__ = ["joined", "require_alike"]


def joined(x: torch.Tensor, beside: torch.Tensor | None) -> torch.Tensor:
    """For an implementation that reads one tensor."""
    return x if beside is None else torch.cat((x, beside), 1)


def require_alike(op: str, x: torch.Tensor, beside: torch.Tensor) -> None:
    same = x.dim() == beside.dim() == 4 and (x.shape[0], *x.shape[2:]) == (beside.shape[0], *beside.shape[2:])
    if not same or x.dtype != beside.dtype or x.device != beside.device:
        told = " and ".join(f"{tuple(t.shape)} of {t.dtype} on {t.device}" for t in (x, beside))
        raise Unsupported(op, f"x and beside that differ in more than their channels: {told}")
