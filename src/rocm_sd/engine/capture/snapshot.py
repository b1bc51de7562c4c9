"""Everything of a call and of a model that a graph has baked in, and whether it still is so.

A graph keeps the addresses of the weights and every decision that Python took: which modules there are, their
hooks, a LoRA's scale, a convolution's padding, training or not. All of it is state of the modules, so their classes and
all of their attributes are compared, as rules do before each call (rewrite/states.py). The weights' values are read at
each replay: they may change. A call is taken apart into its tensors and everything else about it, by which two calls
are of one kind or are not.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from rocm_sd.engine.convolutions import flags_set_by_hand
from rocm_sd.rewrite.guarding import global_hooks, is_transformed
from rocm_sd.rewrite.states import CLASS, Difference, Held, States, equal

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

    from torch import nn

__all__ = ["DormantSnapshot", "FlatCall", "Snapshot", "flatten"]

_MISSING = object()
_HOLDING_TENSORS = frozenset({"_parameters", "_buffers", "_modules"})


class Snapshot:
    """Of a model at the time of a capture, or of those of its modules that are `used`. It does not keep it alive."""

    def __init__(self, model: nn.Module, used: Iterable[nn.Module] | None = None) -> None:
        self._model = ref(model)
        self._kind = type(model)
        self._own = _copied(_unbound(model))
        # Diffusers' registry of hooks holds the model.
        self._own |= {name: Held(self._own[name]) for name in ("_diffusers_hook",) if name in self._own}
        inside = _inside(model, used)
        self._inside = States(inside, strongly=True)
        self._tensors = [
            (f"{path}.{name}" if path else name, tensor)
            for path, module in (("", model), *inside)
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        ]
        self._addresses = [tensor.data_ptr() for _, tensor in self._tensors]

    def difference(self) -> str | None:
        """What has changed since then, in words; None where nothing has."""
        model = self._model()
        if model is None:
            return "the model is gone"
        if type(model) is not self._kind:
            return str(Difference("", model, CLASS, self._kind, type(model)))
        own = _unbound(model)
        if not equal(self._own, own):
            return f"the model: {_which(own, self._own)} has changed"
        # Before each replay of SDXL there are 1930 modules to look at.
        if global_hooks() or not self._inside.same():
            return str(next(self._inside.differences(), "all modules have a hook"))
        for (name, tensor), address in zip(self._tensors, self._addresses, strict=True):
            if tensor.data_ptr() != address:
                return f"{name} has moved in memory"
        return None


def _inside(model: nn.Module, used: Iterable[nn.Module] | None) -> list[tuple[str, nn.Module]]:
    """What is used with all inside of it, and what holds it; by paths."""
    every = [(path, module) for path, module in model.named_modules() if module is not model]
    if used is None:
        return every
    wanted = set(used)
    paths = [path for path, module in every if module in wanted]
    within = tuple(f"{path}." for path in paths)
    holding = {path[:end] for path in paths for end in range(1, len(path) + 1) if path[end : end + 1] in {".", ""}}
    return [(path, module) for path, module in every if path in holding or path.startswith(within)]


class DormantSnapshot:
    """Of a model while its host may change it: a snapshot holds the parameters themselves, and where the host puts
    others in their place, as for a LoRA, the memory of the old ones must be free by then. Compared once, before the
    graph is used again.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(ref(module), type(module), _without_tensors(module)) for module in model.modules()]
        self._tensors = [(ref(tensor), tensor.data_ptr()) for tensor in _tensors(model)]

    def is_of(self, model: nn.Module) -> bool:
        """Whether the model is as it was."""
        modules, tensors = list(model.modules()), _tensors(model)
        if len(modules) != len(self._modules) or len(tensors) != len(self._tensors):
            return False
        for tensor, (known, address) in zip(tensors, self._tensors, strict=True):
            if known() is not tensor or tensor.data_ptr() != address:
                return False
        return all(
            known() is module and type(module) is kind and equal(state, _without_tensors(module))
            for module, (known, kind, state) in zip(modules, self._modules, strict=True)
        )


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _without_tensors(module: nn.Module) -> dict[str, Any]:
    return _copied({name: value for name, value in module.__dict__.items() if name not in _HOLDING_TENSORS})


def _unbound(model: nn.Module) -> dict[str, Any]:
    """Its attributes, without the methods on it that hold the model itself."""
    return {name: getattr(value, "__func__", value) for name, value in model.__dict__.items()}


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    # Hooks, children and a LoRA's scales are dicts inside, which change in place.
    return {name: dict(value) if isinstance(value, dict) else _kept(value) for name, value in attributes.items()}


def _kept(value: Any) -> Any:
    return value.copy() if isinstance(value, (list, set)) else value


def _which(now: dict[str, Any], then: dict[str, Any]) -> str:
    for name in sorted(now.keys() | then.keys()):
        before, after = then.get(name, _MISSING), now.get(name, _MISSING)
        if not equal(before, after):
            return name
    return "an attribute"


def _attention_backend() -> Any:
    """The backend that Diffusers has chosen for all models that take one; None where Diffusers is not in use."""
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    return getattr(getattr(dispatch, "_AttentionBackendRegistry", None), "_active_backend", None)


def _global_state() -> tuple[Any, ...]:
    """What outside of the model decides which kernels a graph has."""
    return (
        _attention_backend(),
        os.environ.get("ROCM_SD_IMPLEMENTATION"),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.deterministic,
        torch.backends.cuda.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
        torch.backends.cuda.mem_efficient_sdp_enabled(),  # type: ignore[no-untyped-call]
        torch.backends.cuda.math_sdp_enabled(),  # type: ignore[no-untyped-call]
        torch.backends.cuda.cudnn_sdp_enabled(),  # type: ignore[no-untyped-call]
    )


@dataclass(frozen=True)
class FlatCall:
    """`shape`: how lists, tuples and dicts lie in one another around the leaves."""

    tensors: list[torch.Tensor]
    leaves: list[Any] = field(repr=False)
    shape: Any = field(repr=False)
    key: Hashable = field(repr=False)

    def with_tensors(self, tensors: list[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same call, of other tensors."""
        given = iter(tensors)
        leaves = iter([next(given) if isinstance(leaf, _Place) else leaf for leaf in self.leaves])
        args, kwargs = _built(self.shape, leaves)
        return args, kwargs

    def changed(self, by: int) -> FlatCall:
        """The same call with other values: each tensor's own, moved on. Numbers that count or index stay, but for
        rows of a text's tokens.
        """
        return replace(self, tensors=[_moved_on(tensor, by) for tensor in self.tensors])

    def without_tensors(self) -> FlatCall:
        """For whoever keeps the call, and must not keep its tensors."""
        return replace(self, tensors=[])


def _moved_on(tensor: torch.Tensor, by: int) -> torch.Tensor:
    is_tokens = tensor.dtype is torch.int64 and tensor.dim() == 2
    if not (tensor.is_floating_point() or is_tokens) or tensor.numel() == 1:
        return tensor
    return tensor.flatten().roll(by).view_as(tensor)


class _Place:
    """Where a tensor was."""


def flatten(
    args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, also: Hashable = None
) -> FlatCall | None:
    """None where something in the call is neither a tensor on the device nor a value that can be compared: tensors of
    a transform of torch.func or of a trace look like plain ones.

    `also`: what else two calls of one kind have in common.
    """
    if is_transformed():
        return None
    leaves: list[Any] = []
    shape = _shape((args, kwargs), leaves)
    tensors: list[torch.Tensor] = []
    kinds: list[Any] = []
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            # A timestep may be on the CPU: stock moves it.
            if type(leaf) is not torch.Tensor or (leaf.device != device and leaf.dim()) or leaf.requires_grad:
                return None
            tensors.append(leaf)
            kinds.append((leaf.dtype, leaf.shape))
            leaves[number] = _Place()
        elif leaf is None or isinstance(leaf, (bool, int, float, str)):
            kinds.append((type(leaf), leaf))
        else:
            return None
    key = (shape, tuple(kinds), _global_state(), flags_set_by_hand(), also)
    return FlatCall(tensors, leaves, shape, key) if tensors else None


def _shape(value: Any, leaves: list[Any]) -> Any:
    kind = type(value)
    if kind is dict:
        return (dict, *((name, _shape(part, leaves)) for name, part in value.items()))
    if kind is list or kind is tuple:
        return (kind, *(_shape(part, leaves) for part in value))
    leaves.append(value)
    return None


def _built(shape: Any, leaves: Iterator[Any]) -> Any:
    if shape is None:
        return next(leaves)
    kind, *parts = shape
    if kind is dict:
        return {name: _built(part, leaves) for name, part in parts}
    return kind(_built(part, leaves) for part in parts)
