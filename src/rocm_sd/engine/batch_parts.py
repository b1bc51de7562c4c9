"""A call of a model for some entries of its batch: which of its inputs have one for each picture, and which are of all.

The samples of a batch do not see each other in these models: norms and attention are of one picture. Where something
might need the whole batch, a call is not divided: an attention processor that is not known, a cache, a hook of the
user's, a tensor of unknown meaning. Asked anew at each call.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from rocm_sd.engine.capture import has_foreign_forward, why_foreign
from rocm_sd.engine.denoisers import denoiser

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from rocm_sd.engine.denoisers import Denoiser

__all__ = ["Divided", "Undivided", "divide", "why_not"]

_PLAIN = (bool, int, float, str, torch.dtype, torch.device)


@dataclass(frozen=True)
class Undivided:
    """`reason`: why a call runs whole."""

    reason: str
    batch: int = 0


@dataclass(frozen=True)
class Divided:
    """A call of `batch` entries."""

    batch: int
    inputs: Denoiser
    names: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reason: None = None

    def run(self, whole: Callable[..., Any], rows: slice) -> Any:
        """The answer for these entries alone, of the forward that answers for all."""
        # By position or by name, as it came: some wrappers of Diffusers look among the named ones only.
        some = [_part(self.inputs, name, value, rows) for name, value in zip(self.names, self.args, strict=False)]
        return whole(*some, **{name: _part(self.inputs, name, value, rows) for name, value in self.kwargs.items()})


def why_not(model: nn.Module) -> str | None:
    """The reason why no call of the model can be divided."""
    if not getattr(denoiser(model), "each", ()):
        return "which of its inputs have an entry for each picture is not known"
    return "its forward is not its class's own" if has_foreign_forward(model) else None


def divide(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Divided | Undivided:
    kind: Any = type(model)
    names = _argument_names(kind)
    given = dict(zip(names, args, strict=False)) | kwargs
    known = denoiser(model)
    if known is None or not known.each:
        return Undivided(f"its class is now {kind.__name__}")
    if len(args) > len(names):
        return Undivided(f"it was given {len(args)} arguments, and takes {len(names)}")
    batch = _entries(given.get(known.each[0]))
    reason = _why_whole(model, known, given, batch)
    return Divided(batch, known, names, args, kwargs) if reason is None else Undivided(reason, batch)


@lru_cache(maxsize=64)
def _argument_names(kind: Any) -> tuple[str, ...]:
    return tuple(signature(kind.forward).parameters)[1:]


def _entries(value: Any) -> int:
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else 0


def _why_whole(model: nn.Module, inputs: Denoiser, given: dict[str, Any], batch: int) -> str | None:
    if batch < 2:
        return f"a batch of {batch} has no halves"
    if model.training:
        return "the model is in training mode"
    if given.get("down_block_additional_residuals") is not None and given.get("mid_block_additional_residual") is None:
        return "it takes the states of a T2I adapter out of the caller's list"
    for name, value in given.items():
        if not all(_is_known(inputs, name, leaf, batch) for leaf in pytree.tree_leaves(value)):
            return f"its input {name} is not known to have {batch} entries"
    return why_foreign(model)


def _is_known(inputs: Denoiser, name: str, leaf: Any, batch: int) -> bool:
    if not isinstance(leaf, torch.Tensor):
        return leaf is None or isinstance(leaf, _PLAIN)
    if _is_for_all(inputs, name, leaf):
        return True
    return (name in inputs.each or name in inputs.one_or_each) and _entries(leaf) == batch


def _is_for_all(inputs: Denoiser, name: str, tensor: torch.Tensor) -> bool:
    return name in inputs.shared or (name in inputs.one_or_each and tensor.numel() == 1)


def _part(inputs: Denoiser, name: str, value: Any, rows: slice) -> Any:
    """Containers come anew: what a call takes out of one must be there for the next."""

    def part(leaf: Any) -> Any:
        return leaf if not isinstance(leaf, torch.Tensor) or _is_for_all(inputs, name, leaf) else leaf[rows]

    return pytree.tree_map(part, value)
