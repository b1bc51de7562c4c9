"""Calls of an op that were made before, each with what computes it, found by the layouts of their tensors.

An op checks its arguments, makes a problem of them, chooses, and works out how its kernels are launched: 20 us of the
host's time, and the same for all calls of tensors that are laid out alike. Whoever may change a choice forgets them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Call = Callable[..., Any]
    Key = tuple[Any, ...]

__all__ = ["BoundCalls", "key_of"]

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
# A model has some hundreds; pictures of ever new sizes would fill the memory.
_MOST = 4096


def key_of(name: str | None, arguments: tuple[Any, ...]) -> Key | None:
    """The same for calls that one bound call serves; None for a call that none serves.

    All but the tensors' values and addresses is in it. A tensor without strides or memory of its own, as one that is
    batched by torch.func, is not plain, and says so by an error.
    """
    key: list[Any] = [name]
    gradients = torch.is_grad_enabled()
    try:
        for each in arguments:
            if each is None:
                key.append(None)
            elif type(each) in _PLAIN:
                if gradients and each.requires_grad:
                    return None
                key += (each.shape, each.stride(), each.dtype, each.device)
            elif isinstance(each, torch.Tensor):
                return None
            else:
                # 2.0 is 2 to a dictionary, and to no op.
                key += (type(each), each)
    except RuntimeError:
        return None
    return tuple(key)


def _is_hashable(key: Key) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True


class BoundCalls:
    """Of one op, by the implementation that is asked for, if any, and the arguments. Threads may share it."""

    def __init__(self) -> None:
        self.by_key: dict[Key | None, Call] = {}

    def keeper(self, name: str | None, arguments: tuple[Any, ...]) -> Callable[[Call], Call] | None:
        """What keeps a call like this one, and nothing where all were forgotten since; None for what none serves."""
        key, kept = key_of(name, arguments), self.by_key
        if key is None or not _is_hashable(key):
            return None

        def keep(call: Call) -> Call:
            if len(kept) >= _MOST:
                kept.clear()
            kept[key] = call
            return call

        return keep

    def forget(self) -> None:
        # Another dictionary: what is being bound now ends in the one that nobody looks into any more.
        self.by_key = {}
