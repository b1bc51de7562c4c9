"""What torch carries through plain calls: derivatives of forward mode, and the transforms of torch.func.

A kernel, a captured graph and an op of torch's library see values alone: a derivative that was carried is gone after
them, silently. torch's own ops carry it on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["at_hand", "carry", "derivatives"]

# A torch without the question: kernels refuse what its transforms wrap, since that has no memory.
_in_func = getattr(torch._C, "_are_functorch_transforms_active", bool)  # noqa: SLF001 -- it has no public name


def at_hand() -> bool:
    """Whether any tensor may carry something, at a tenth of a microsecond: every call of an op asks."""
    return forward_ad._current_level >= 0 or bool(_in_func())  # noqa: SLF001 -- it has no public name


def carry(values: Iterable[Any]) -> bool:
    """Whether one of these tensors does."""
    return at_hand() and (bool(_in_func()) or derivatives(values))


def derivatives(values: Iterable[Any]) -> bool:
    """Whether one of these tensors carries a derivative of forward mode."""
    if forward_ad._current_level < 0:  # noqa: SLF001 -- as above
        return False
    tensors = (each for each in values if isinstance(each, torch.Tensor))
    return any(forward_ad.unpack_dual(each).tangent is not None for each in tensors)  # type: ignore[no-untyped-call]
