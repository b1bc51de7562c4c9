"""Tensors as kernels read them: rows, channels-last pictures, and channels that lie in two tensors."""

from __future__ import annotations

import torch

from rocm_sd.errors import Unsupported

__all__ = [
    "Part", "as_dtype", "as_rows", "channels_last", "dense", "has_gaps", "is_channels_last", "is_dense", "joined",
    "require_alike", "rows_in_place",
]  # fmt: skip

Part = torch.Tensor | None  # of a call that may do without it: a bias, a residual


def dense(tensor: Part, dtype: torch.dtype | None = None) -> Part:
    """An optional part without gaps, in its own dtype or in another."""
    if tensor is None:
        return None
    return tensor.contiguous() if dtype is None else tensor.to(dtype).contiguous()


def as_dtype(tensor: Part, dtype: torch.dtype) -> Part:
    return None if tensor is None else tensor.to(dtype)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """[M, K] with the values of a row side by side; a view where that can be."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def rows_in_place(x: torch.Tensor) -> Part:
    """`as_rows` where that is a view; None where x would be copied."""
    try:
        rows = x.view(-1, x.shape[-1])
    except RuntimeError:
        return None
    return rows if rows.stride(1) == 1 else None


def is_dense(*parts: Part) -> bool:
    """Whether `dense` would hand each of them on as it is."""
    return all(part is None or part.is_contiguous() for part in parts)


def is_channels_last(*parts: Part) -> bool:
    """Whether `channels_last` would hand each of them on as it is."""
    return all(part is None or part.is_contiguous(memory_format=torch.channels_last) for part in parts)


def has_gaps(x: torch.Tensor) -> bool:
    """Whether the samples of x, [B, S, K], lie apart, though the values of each row lie together.

    So lie the picture's tokens, and the text's, of what was computed of both at once.
    """
    return x.dim() == 3 and x.shape[0] > 1 and x.stride(2) == 1 and x.stride(0) != x.shape[1] * x.stride(1)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def joined(x: torch.Tensor, concat: Part) -> torch.Tensor:
    """For an implementation that reads one tensor: x, and the channels that follow it."""
    return x if concat is None else torch.cat((x, concat), 1)


def require_alike(op: str, x: torch.Tensor, concat: torch.Tensor) -> None:
    same = x.dim() == concat.dim() == 4 and (x.shape[0], *x.shape[2:]) == (concat.shape[0], *concat.shape[2:])
    if not same or x.dtype != concat.dtype or x.device != concat.device:
        both = " and ".join(f"{tuple(t.shape)} of {t.dtype} on {t.device}" for t in (x, concat))
        raise Unsupported(op, f"x and concat that differ in more than their channels: {both}")
