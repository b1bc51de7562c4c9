"""Whether all ranks draw the same picture: they tell each other at its first step what they begin with.

Ranks with other seeds or prompts would put halves or rows of different pictures together, and nothing would look wrong
but the picture. A few sums tell them apart. Cards of different kinds round differently, which is no other picture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.utils import _pytree as pytree

from rocm_sd.engine import Installed, follow_schedule
from rocm_sd.errors import JobFailed
from rocm_sd.rewrite import forwards

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from rocm_sd.parallel.ranks import Ranks

__all__ = ["install_check", "why_unlike"]

# Of the norm: rounding in float16 is some thousandths of it, and other noise as much as the norm.
_TOLERANCE = 0.01


def install_check(pipe: Any, model: nn.Module, ranks: Ranks) -> Installed:
    """Raises JobFailed on every rank, at the first step of a picture that one of them draws with other inputs."""
    run_of, stop = follow_schedule(pipe)
    checked: Callable[[], Any] = lambda: None  # noqa: E731 -- in place of a reference to the last run

    def answer(_: nn.Module, whole: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal checked
        run = run_of()
        if run is not None and checked() is not run:
            checked = ref(run)
            _require_alike(ranks, (args, kwargs))
        return whole(*args, **kwargs)

    take_off = forwards.surround(model, answer)

    def restore() -> None:
        take_off()
        stop()

    return Installed(tuple, restore)


def _require_alike(ranks: Ranks, given: Any) -> None:
    said = ranks.agree(_sums(given))
    for rank, theirs in enumerate(said):
        why = why_unlike(said[0], theirs)
        if why is not None:
            raise JobFailed(
                f"Ranks {ranks.members[0]} and {ranks.members[rank]} draw different pictures: {why}.",
                hint="Give all of them the same prompt, options and seed: generator=torch.Generator().manual_seed(0).",
            )


def _sums(given: Any) -> list[tuple[str, tuple[int, ...], list[float]]]:
    """Of each tensor that has a picture or a text in it: its name, its shape, its norm and two sums by weight."""
    found = [
        # A sample may be given by its position.
        (str(getattr(place[-1], "key", "sample")), leaf)
        for place, leaf in pytree.tree_flatten_with_path(given)[0]
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dim() > 1 and leaf.numel()
    ]
    return [(name, tuple(leaf.shape), _of(leaf.detach())) for name, leaf in found]


def _of(tensor: torch.Tensor) -> list[float]:
    values = tensor.flatten().float()
    place = torch.arange(len(values), device=values.device, dtype=torch.float32)
    sums = (values.norm(), (values * torch.cos(0.7 * place)).sum(), (values * torch.cos(1.3 * place + 1)).sum())
    return [float(each) for each in torch.stack(sums).tolist()]


def why_unlike(ours: list[Any], theirs: list[Any]) -> str | None:
    """In words, where two ranks' sums are not those of the same inputs."""
    if [each[:2] for each in ours] != [each[:2] for each in theirs]:
        return "their inputs have other shapes"
    for (name, _, (norm, *sums)), (_, _, (their_norm, *their_sums)) in zip(ours, theirs, strict=True):
        apart = max(abs(one - other) for one, other in zip([norm, *sums], [their_norm, *their_sums], strict=True))
        # Not the other way round: what is not a number is no difference of the seeds.
        if apart > _TOLERANCE * max(norm, their_norm):
            return f"the model is given another {name}"
    return None
