"""The two halves of a batch one after the other: with guidance, first without the prompt, then with it.

The samples of a batch do not see each other in these models: norms and attention are of one picture. So the halves give
what the whole gives, with half the activations. Where something might need the whole batch, it runs whole: an attention
processor that is not listed here, a cache, a hook of the user's, a tensor of unknown meaning. Asked anew at each call.
"""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from inspect import signature
from itertools import count
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.engine.capture import foreign
from rocm_sd.engine.installed import Installed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

__all__ = ["install", "why_not"]


@dataclass(frozen=True)
class _Inputs:
    """`each`: arguments, nested or not, whose every tensor has one entry for each sample; the first tells how many.

    `one_or_each`: the same, or one entry for all. `shared`: tensors that say nothing of samples.
    Any other argument may hold numbers and words, but no tensor.
    """

    each: tuple[str, ...]
    one_or_each: tuple[str, ...] = ("timestep",)
    shared: tuple[str, ...] = ()


_UNET = ("sample", "encoder_hidden_states", "class_labels", "timestep_cond", "attention_mask", "added_cond_kwargs")
_TRANSFORMER = ("hidden_states", "encoder_hidden_states", "pooled_projections")

# down_intrablock_additional_residuals is missing: the UNet takes the states of a T2I adapter out of the caller's list.
_KNOWN = {
    "UNet2DConditionModel": _Inputs(
        (*_UNET, "encoder_attention_mask", "down_block_additional_residuals", "mid_block_additional_residual")
    ),
    "ControlNetModel": _Inputs((*_UNET, "controlnet_cond")),
    "SD3Transformer2DModel": _Inputs((*_TRANSFORMER, "block_controlnet_hidden_states")),
    "FluxTransformer2DModel": _Inputs(
        (*_TRANSFORMER, "controlnet_block_samples", "controlnet_single_block_samples"),
        ("timestep", "guidance"),
        ("img_ids", "txt_ids"),
    ),
}

_PLAIN = (bool, int, float, str, torch.dtype, torch.device)
_SLOTS = count()


@dataclass
class _Tally:
    halving: bool = True
    halved: int = 0
    whole: Counter[str] = field(default_factory=Counter)


def why_not(model: nn.Module) -> str | None:
    """The reason to leave a model alone."""
    kind = type(model)
    if kind.__name__ not in _KNOWN or not kind.__module__.startswith("diffusers."):
        return "which of its inputs have an entry for each picture is not known"
    return "its forward is not its class's own" if foreign.has_foreign_forward(model) else None


def install(model: nn.Module, inner: Callable[..., Any] | None = None) -> Installed:
    """Give the model a forward that calls `inner`, or the forward that it has, once for each half of an even batch.

    A forward that takes precomputed values of a whole batch, or is captured with one, belongs inside: as `inner`, or
    installed before.
    """
    kind = type(model).__name__
    reason = why_not(model)
    if reason is not None:
        return Installed(lambda: (f"{kind} runs whole batches, because {reason}",), lambda: None)
    tally = _Tally()
    restore = _replace_forward(model, inner, tally)

    def notes() -> Iterator[str]:
        yield (
            f"{kind} runs the two halves of a batch one after the other, with half the activations and the same "
            f"result: {tally.halved} calls so far"
        )
        for why, calls in tally.whole.items():
            yield f"{kind} ran {calls} calls whole, because {why}"

    return Installed(lambda: tuple(notes()), restore)


def _replace_forward(model: nn.Module, inner: Callable[..., Any] | None, tally: _Tally) -> Callable[[], None]:
    own = model.__dict__
    # accelerate's offload hooks keep what they wrapped there: the weights come in once for both halves.
    attribute = "_old_forward" if "_old_forward" in own else "forward"
    before = own.get(attribute)
    # On the instance, as accelerate does it: a deep copy of the model gets a deep copy of what is called. A name of
    # its own for each: one that a wrapper of the user's keeps alive must not find what a later one calls.
    slot = f"_rocm_sd_whole_batch_{next(_SLOTS)}"
    own[slot] = inner or before or MethodType(type(model).forward, model)

    # Named as the method that it stands in for: pickle looks a bound method up by that name, and finds the class's own.
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        whole = self.__dict__.get(slot) or MethodType(type(self).forward, self)
        if not tally.halving or torch.compiler.is_compiling():
            return whole(*args, **kwargs)
        return _in_halves(self, whole, tally, args, kwargs)

    ours = MethodType(forward, model)
    setattr(model, attribute, ours)
    reference = weakref.ref(model)

    def restore() -> None:
        tally.halving = False
        model = reference()
        if model is None:
            return
        # A hook that was added or removed since then has moved our forward to the other attribute. A wrapper of
        # another kind still calls it: then it stays, and hands every call on.
        for name in ("forward", "_old_forward"):
            if model.__dict__.get(name) is not ours:
                continue
            del model.__dict__[slot]
            if before is None and name == "forward":
                delattr(model, name)
            else:
                setattr(model, name, before or MethodType(type(model).forward, model))

    return restore


def _in_halves(
    model: nn.Module, whole: Callable[..., Any], tally: _Tally, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    kind: Any = type(model)
    names = _argument_names(kind)
    given = dict(zip(names, args, strict=False)) | kwargs
    inputs = _KNOWN.get(kind.__name__)
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

    # Copied before the second call, for which a captured graph uses the same memory.
    out = _with_room(run(slice(0, half)), batch)
    _fill(out, run(slice(half, batch)), half)
    return out


@lru_cache(maxsize=64)
def _argument_names(kind: Any) -> tuple[str, ...]:
    return tuple(signature(kind.forward).parameters)[1:]


def _entries(value: Any) -> int:
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else 0


def _why_whole(model: nn.Module, inputs: _Inputs, given: dict[str, Any], batch: int) -> str | None:
    if batch < 2 or batch % 2:
        return f"a batch of {batch} has no halves"
    if model.training:
        return "the model is in training mode"
    if given.get("down_block_additional_residuals") is not None and given.get("mid_block_additional_residual") is None:
        return "it takes the states of a T2I adapter out of the caller's list"
    for name, value in given.items():
        if not _is_understood(inputs, name, value, batch):
            return f"its input {name} is not known to have {batch} entries"
    return foreign.found_in(model)


def _is_understood(inputs: _Inputs, name: str, value: Any, batch: int) -> bool:
    if isinstance(value, torch.Tensor):
        if name in inputs.shared or (name in inputs.one_or_each and value.numel() == 1):
            return True
        return (name in inputs.each or name in inputs.one_or_each) and _entries(value) == batch
    if isinstance(value, dict):
        return all(_is_understood(inputs, name, inside, batch) for inside in value.values())
    if isinstance(value, list | tuple):
        return all(_is_understood(inputs, name, inside, batch) for inside in value)
    return value is None or isinstance(value, _PLAIN)


def _part(inputs: _Inputs, name: str, value: Any, rows: slice) -> Any:
    if isinstance(value, torch.Tensor):
        whole = name in inputs.shared or (name in inputs.one_or_each and value.numel() == 1)
        return value if whole else value[rows]
    # Containers anew: what a call takes out of one must be there for the next.
    if isinstance(value, dict):
        return {key: _part(inputs, name, inside, rows) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        parts = [_part(inputs, name, inside, rows) for inside in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def _with_room(part: Any, batch: int) -> Any:
    """The part's structure with tensors for a whole batch, of which the first entries are the part's."""
    if isinstance(part, torch.Tensor):
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
    if isinstance(part, dict):
        return type(part)(**{name: _with_room(inside, batch) for name, inside in part.items()})
    if isinstance(part, list | tuple):
        parts = [_with_room(inside, batch) for inside in part]
        return parts if isinstance(part, list) else tuple(parts)
    return part


def _fill(out: Any, part: Any, begin: int) -> None:
    if isinstance(out, torch.Tensor):
        out[begin:] = part
    elif isinstance(out, dict):
        for name, inside in out.items():
            _fill(inside, part[name], begin)
    elif isinstance(out, list | tuple):
        for inside, new in zip(out, part, strict=True):
            _fill(inside, new, begin)
