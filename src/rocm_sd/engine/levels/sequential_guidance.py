"""The two halves of a batch one after the other: with guidance, first without the prompt, then with it.

The samples of a batch do not see each other in these models: norms and attention are of one picture. So the halves give
what the whole gives, with half the activations. Where something might need the whole batch, it runs whole: an attention
processor that is not listed here, a cache, a hook of the user's, a tensor of unknown meaning. Asked anew at each call.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from rocm_sd.engine.capture import has_foreign_forward, why_foreign
from rocm_sd.engine.denoisers import denoiser
from rocm_sd.engine.installed import Installed
from rocm_sd.rewrite import forwards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from rocm_sd.engine.denoisers import Denoiser

__all__ = ["install", "why_not"]

_PLAIN = (bool, int, float, str, torch.dtype, torch.device)


@dataclass
class _Tally:
    halving: bool = True
    halved: int = 0
    whole: Counter[str] = field(default_factory=Counter)


def why_not(model: nn.Module) -> str | None:
    """The reason to skip a model."""
    if not getattr(denoiser(model), "each", ()):
        return "which of its inputs have an entry for each picture is not known"
    return "its forward is not its class's own" if has_foreign_forward(model) else None


def install(model: nn.Module) -> Installed:
    """Give the model a forward that calls the forward that it has, once for each half of an even batch.

    A forward that takes precomputed values of a whole batch, or is captured with one, is to be installed before.
    """
    kind = type(model).__name__
    reason = why_not(model)
    if reason is not None:
        return Installed(lambda: (f"{kind} runs whole batches, because {reason}",), lambda: None)
    tally = _Tally()

    def answer(model: nn.Module, whole: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A wrapper by somebody else may outlive `restore`.
        return _in_halves(model, whole, tally, args, kwargs) if tally.halving else whole(*args, **kwargs)

    take_off = forwards.surround(model, answer)

    def restore() -> None:
        tally.halving = False
        take_off()

    def notes() -> Iterator[str]:
        yield (
            f"{kind} runs the two halves of a batch one after the other, with half the activations and the same "
            f"result: {tally.halved} calls so far"
        )
        for why, calls in tally.whole.items():
            yield f"{kind} ran {calls} calls whole, because {why}"

    return Installed(lambda: tuple(notes()), restore)


def _in_halves(
    model: nn.Module, whole: Callable[..., Any], tally: _Tally, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    kind: Any = type(model)
    names = _argument_names(kind)
    given = dict(zip(names, args, strict=False)) | kwargs
    known = denoiser(model)
    inputs = known if known is not None and known.each else None
    batch = _entries(given.get(inputs.each[0])) if inputs else 0
    reason = _why_whole(model, inputs, given, batch) if inputs else f"its class is now {kind.__name__}"
    if len(args) > len(names):
        reason = f"it was given {len(args)} arguments, and takes {len(names)}"
    if inputs is None or reason is not None:
        tally.whole[str(reason)] += 1
        return whole(*args, **kwargs)
    tally.halved += 1
    half = batch // 2

    def run(rows: slice) -> Any:
        # By position or by name, as it came: some wrappers of Diffusers look among the named ones only.
        some = [_part(inputs, name, value, rows) for name, value in zip(names, args, strict=False)]
        return whole(*some, **{name: _part(inputs, name, value, rows) for name, value in kwargs.items()})

    first, tree = pytree.tree_flatten(run(slice(0, half)))
    # Copied before the second call, for which a captured graph uses the same memory.
    out = [_with_room(leaf, batch) if isinstance(leaf, torch.Tensor) else leaf for leaf in first]
    for whole_batch, leaf in zip(out, pytree.tree_leaves(run(slice(half, batch))), strict=True):
        if isinstance(leaf, torch.Tensor):
            whole_batch[half:] = leaf
    return pytree.tree_unflatten(out, tree)


@lru_cache(maxsize=64)
def _argument_names(kind: Any) -> tuple[str, ...]:
    return tuple(signature(kind.forward).parameters)[1:]


def _entries(value: Any) -> int:
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else 0


def _why_whole(model: nn.Module, inputs: Denoiser, given: dict[str, Any], batch: int) -> str | None:
    if batch < 2 or batch % 2:
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


def _with_room(part: torch.Tensor, batch: int) -> torch.Tensor:
    """A tensor for a whole batch, of which the first entries are the part's."""
    channels_last = part.dim() == 4 and not part.is_contiguous()
    channels_last = channels_last and part.is_contiguous(memory_format=torch.channels_last)
    out = torch.empty(
        (batch, *part.shape[1:]),
        dtype=part.dtype,
        device=part.device,
        memory_format=torch.channels_last if channels_last else torch.contiguous_format,
    )
    out[: part.shape[0]] = part
    return out
