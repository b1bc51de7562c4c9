"""`patch` for models: which of their inputs are rows of pictures, and how often each halves them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from rocm_sd.engine import Installed
from rocm_sd.engine.approximation import of_steps
from rocm_sd.errors import Unsupported
from rocm_sd.parallel.answers import hand_on
from rocm_sd.parallel.patch import PatchMode
from rocm_sd.parallel.rows import deal
from rocm_sd.parallel.stale import StaleExchanges
from rocm_sd.rewrite import forwards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rocm_sd.engine.approximation import PictureStep, PictureSteps, Setting
    from rocm_sd.parallel.ranks import Ranks

__all__ = ["Staleness", "can_be_patched", "install_patches"]


@dataclass(frozen=True)
class _Pictures:
    """`inputs`: by name, whose every tensor of four dimensions is rows. `larger`: one that the part of the model named
    `brought_down_by` brings to their size, by convolutions that halve it.
    """

    inputs: tuple[str, ...]
    larger: str | None = None
    brought_down_by: str = ""


_RESIDUALS = ("down_block_additional_residuals", "mid_block_additional_residual")
_MODELS = {
    "UNet2DConditionModel": _Pictures(("sample", *_RESIDUALS)),
    "ControlNetModel": _Pictures(("sample",), "controlnet_cond", "controlnet_cond_embedding"),
    "Decoder": _Pictures(("sample",)),
}


def can_be_patched(model: nn.Module) -> bool:
    return type(model).__name__ in _MODELS and type(model).__module__.startswith("diffusers.")


class Staleness:
    """Which calls of a model compute with what other ranks sent in the call before: by `settings`, and the step."""

    def __init__(self, steps: PictureSteps, settings: list[Setting]) -> None:
        self._steps, self._settings = steps, settings
        self._exchanges: dict[int, StaleExchanges] = {}
        self.last: Setting | None = None
        self._step: PictureStep | None = None

    def look_at(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before each call, on every rank."""
        self._step = self._steps.of(model, args, kwargs)
        self.last = None if self._step is None else of_steps(self._settings, self._step.of)

    def exchanges(self, ranks: Ranks) -> StaleExchanges | None:
        """Of the call that was looked at; None where all of it waits."""
        known, step = self._exchanges.get(ranks.size), self._step
        after = 0 if self.last is None else self.last.approximation.stale_after
        if step is None or not after or ranks.size == 1:
            self.forget()
            return None
        known = known or self._exchanges.setdefault(ranks.size, StaleExchanges(ranks))
        known.begin(late=step.since >= after, last=step.is_last)
        return known

    def forget(self) -> None:
        for each in self._exchanges.values():
            each.forget()

    def notes(self, kind: str) -> Iterator[str]:
        # Of the pictures so far; before the first one, of each number of steps.
        for setting in self._settings if self.last is None else [self.last]:
            since = f" from {setting.from_steps} steps on" if self.last is None and setting.from_steps > 1 else ""
            if setting.approximation.stale_after:
                yield f"{kind} is approximated{since}: {setting.approximation} ({setting.why})"
        late = sum(each.late_calls for each in self._exchanges.values())
        yield f"{kind}: {late} calls so far had rows of other ranks that are a step old"


def install_patches(
    model: nn.Module, ranks: Ranks, weights: Sequence[float], stale: Staleness | None = None
) -> Installed:
    """Give the model a forward that computes this rank's rows, and has the others' from them."""
    kind = type(model).__name__
    if not can_be_patched(model):
        raise Unsupported("patch", f"{kind}: which of its inputs are pictures is not known", hint="Use data, or cfg.")
    pictures, calls = _MODELS[kind], Counter[int]()

    def answer(model: nn.Module, whole: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if stale is not None:
            stale.look_at(model, args, kwargs)
        return _in_rows(model, whole, pictures, ranks, weights, stale, calls, args, kwargs)

    take_off = forwards.surround(model, answer)

    def notes() -> Iterator[str]:
        yield f"{kind} computes rows of a picture on each of {ranks.size} ranks: {calls.total()} calls so far"
        for working in sorted(calls.keys() - {ranks.size}):
            yield f"{kind}: {calls[working]} of them on {working}: its smallest pictures have no more rows"
        yield from () if stale is None else stale.notes(kind)

    def restore() -> None:
        take_off()
        if stale is not None:
            stale.forget()

    return Installed(lambda: tuple(notes()), restore)


def _in_rows(
    model: nn.Module, whole: Callable[..., Any], pictures: _Pictures, ranks: Ranks, weights: Sequence[float],
    stale: Staleness | None, calls: Counter[int], args: tuple[Any, ...], kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    names = ("sample", *pictures.inputs[1:])
    given = {"sample": args[0], **kwargs} if args else dict(kwargs)
    sample = given["sample"]
    if any(isinstance(each, torch.Tensor) and each.dim() == 4 for each in args[1:]):
        raise Unsupported("patch", "pictures that are given by position", hint="Give them by name.")
    larger = given.get(pictures.larger) if pictures.larger else None
    extra = _convolved_down(model.get_submodule(pictures.brought_down_by)) if larger is not None else 0
    top = deal((larger if larger is not None else sample).shape[2], extra + _halvings(model), weights)
    rows = top
    for _ in range(extra):
        rows = rows.coarser
    if rows.height != sample.shape[2]:
        raise Unsupported("patch", f"a picture of {rows.height} rows for latents of {sample.shape[2]}")
    with_rows = sum(count > 0 for count in top.counts)
    calls[with_rows] += 1
    working, without = ranks.first(with_rows), range(with_rows, ranks.size)
    if working is None:
        return hand_on(ranks, None, 0, without, sample.device)
    mode = PatchMode(working, rows.among(working.size), None if stale is None else stale.exchanges(working))
    split: dict[str, Any] = {
        name: pytree.tree_map(lambda leaf: _own(mode, leaf), given[name]) for name in names if name in given
    }
    if larger is not None and pictures.larger is not None:
        split[pictures.larger] = mode.own(larger, top.among(working.size))
    rest = args[1:]
    with mode:
        found = whole(split.pop("sample"), *rest, **{**{k: v for k, v in kwargs.items() if k != "sample"}, **split})
    leaves, tree = pytree.tree_flatten(found)
    leaves = [mode.whole(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    answer = pytree.tree_unflatten(leaves, tree)
    # Those without rows have the answer, too.
    return hand_on(ranks, answer, 0, without, sample.device) if without else answer


def _own(mode: PatchMode, leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.dim() != 4:
        return leaf
    return mode.own(leaf, mode.rows.of_height(leaf.shape[2]))


def _halvings(model: nn.Module) -> int:
    """How many convolutions take every other row, one after the other: blocks but the last end in one."""
    return sum(getattr(block, "downsamplers", None) is not None for block in getattr(model, "down_blocks", ()))


def _convolved_down(part: nn.Module) -> int:
    return sum(isinstance(each, nn.Conv2d) and each.stride[0] == 2 for each in part.modules())
