"""The two halves of a batch one after the other: with guidance, first without the prompt, then with it.

The samples of a batch do not see each other in these models: norms and attention are of one picture. So the halves give
what the whole gives, with half the activations. Where something might need the whole batch, it runs whole.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from rocm_sd.engine.batch_parts import Undivided, divide, why_not
from rocm_sd.engine.installed import Installed
from rocm_sd.rewrite import forwards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

__all__ = ["install", "why_not"]


@dataclass
class _Tally:
    halving: bool = True
    halved: int = 0
    whole: Counter[str] = field(default_factory=Counter)


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
    divided = divide(model, args, kwargs)
    if divided.reason is None and divided.batch % 2:
        divided = Undivided(f"a batch of {divided.batch} has no halves")
    if divided.reason is not None:
        tally.whole[divided.reason] += 1
        return whole(*args, **kwargs)
    tally.halved += 1
    batch, half = divided.batch, divided.batch // 2
    first, tree = pytree.tree_flatten(divided.run(whole, slice(0, half)))
    # Copied before the second call, for which a captured graph uses the same memory.
    out = [_with_room(leaf, batch) if isinstance(leaf, torch.Tensor) else leaf for leaf in first]
    for whole_batch, leaf in zip(out, pytree.tree_leaves(divided.run(whole, slice(half, batch))), strict=True):
        if isinstance(leaf, torch.Tensor):
            whole_batch[half:] = leaf
    return pytree.tree_unflatten(out, tree)


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
