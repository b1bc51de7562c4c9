"""A model and a call of it without their tensors, and both again in another process, with random values.

What is sent is a pickle from this process to its own worker. Of a tensor it has the shape, the strides and the dtype,
so nothing is copied on the card; hooks and stand-ins for a forward stay behind, so the model comes as its class made
it. Whatever cannot be pickled (a lambda of the user's, say) is the reason that a model cannot be measured.
"""

from __future__ import annotations

import copyreg
import hashlib
import io
import json
import math
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rocm_sd.ops.samples import dtype_name
from rocm_sd.rewrite.eight_bits import EightBitLayer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["Rebuilt", "Skeleton", "described_call", "model_key"]

_LEFT_BEHIND = ("forward", "_old_forward", "_hf_hook", "_diffusers_hook", "is_for_a_time")
_HOOKS = "hooks"
# The engine lays these together over all blocks, and one memory cannot have two neighbours.
_NEVER_SHARED = "time_emb_proj"
_INSTEAD = 0.02  # the size of a bias; a norm's weight is 1


@dataclass(frozen=True)
class _TensorSpec:
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    parameter: bool

    def meta(self) -> torch.Tensor:
        made = torch.empty_strided(self.shape, self.strides, dtype=getattr(torch, self.dtype), device="meta")
        return nn.Parameter(made, requires_grad=False) if self.parameter else made


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return None
        if type(obj) not in (torch.Tensor, nn.Parameter) or obj.layout is not torch.strided:
            raise pickle.PicklingError(f"a tensor of class {type(obj).__name__}")
        spec = _TensorSpec(tuple(obj.shape), obj.stride(), dtype_name(obj.dtype), isinstance(obj, nn.Parameter))
        return self._numbers.setdefault(id(obj), len(self._numbers)), spec

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, nn.Module) or _has_own_state(type(obj)):
            return NotImplemented
        state = {
            name: type(value)() if _HOOKS in name and isinstance(value, dict) else value
            for name, value in obj.__dict__.items()
            if name not in _LEFT_BEHIND
        }
        return copyreg.__newobj__, (type(obj),), state  # type: ignore[attr-defined]


def _has_own_state(kind: type) -> bool:
    return getattr(kind, "__getstate__", None) is not getattr(nn.Module, "__getstate__", None)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._made: dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: Any) -> torch.Tensor:
        number, spec = pid
        if number not in self._made:
            self._made[number] = spec.meta()
        return self._made[number]


@dataclass(frozen=True)
class Rebuilt:
    """A model on the device, and a call of it. `share`: blocks that are alike have their weights in common."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        return self.model(*self.args, **self.kwargs)


@dataclass(frozen=True)
class Skeleton:
    content: bytes
    weights: int

    @classmethod
    def of(cls, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Skeleton:
        """Raises what pickle raises for what cannot be taken along."""
        file = io.BytesIO()
        _Pickler(file).dump((model, args, dict(kwargs)))
        return cls(file.getvalue(), sum(each.nbytes for each in (*model.parameters(), *model.buffers())))

    def rebuilt(self, device: torch.device, *, share: bool) -> Rebuilt:
        model, args, kwargs = _Unpickler(io.BytesIO(self.content)).load()
        random = torch.Generator(device).manual_seed(0)
        _fill(model, device, random, share=share)
        made: dict[int, torch.Tensor] = {}

        def filled(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if id(value) not in made:
                    made[id(value)] = _random(value, device, random, 1.0)
                return made[id(value)]
            if isinstance(value, dict):
                return {name: filled(part) for name, part in value.items()}
            return type(value)(map(filled, value)) if type(value) in (list, tuple) else value

        return Rebuilt(model.eval(), filled(args), filled(kwargs))


def _fill(model: nn.Module, device: torch.device, random: torch.Generator, *, share: bool) -> None:
    made: dict[int, torch.Tensor] = {}
    shared: dict[Any, torch.Tensor] = {}
    for path, module in model.named_modules():
        for own in (module._parameters, module._buffers):  # noqa: SLF001 -- torch has no way to put a buffer in place
            for name, tensor in own.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    place = (*(part for part in path.split(".") if not part.isdecimal()), name)
                    key = (place, tensor.shape, tensor.dtype, isinstance(tensor, nn.Parameter))
                    found = shared.get(key) if share and _NEVER_SHARED not in place else None
                    made[id(tensor)] = _weight(name, tensor, device, random) if found is None else found
                    shared[key] = made[id(tensor)]
                own[name] = made[id(tensor)]


def _weight(name: str, tensor: torch.Tensor, device: torch.device, random: torch.Generator) -> torch.Tensor:
    matrix = tensor.dim() > 1
    std = max(1, math.prod(tensor.shape[1:])) ** -0.5 if matrix else _INSTEAD
    filled = _random(tensor, device, random, std)
    if name == "weight" and not matrix and filled.is_floating_point():
        filled += 1
    return nn.Parameter(filled, requires_grad=False) if isinstance(tensor, nn.Parameter) else filled


def _random(tensor: torch.Tensor, device: torch.device, random: torch.Generator, std: float) -> torch.Tensor:
    """Integers are 0, which every model takes as a timestep or an index."""
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if not tensor.is_floating_point():
        return empty.zero_()
    if torch.finfo(tensor.dtype).bits < 16:
        return empty.copy_(torch.randn(tensor.shape, generator=random, device=device) * std)
    return empty.normal_(0, std, generator=random)


def model_key(model: nn.Module) -> str:
    """One text for models that compute alike: a LoRA, other weights or a rule make no other model of it.

    By Diffusers' config where there is one, otherwise by the shapes of all weights. Layers in 8 bits have other
    kernels, and make another one.
    """
    config = getattr(model, "config", None)
    parameter = next(model.parameters(), None)
    dtype = "" if parameter is None else dtype_name(parameter.dtype)
    if config is not None and hasattr(config, "items"):
        # As JSON, since a tuple of the code is a list once it was saved and loaded.
        facts = sorted((str(k), json.dumps(v, default=repr)) for k, v in config.items() if not str(k).startswith("_"))
    else:
        facts = [(name, repr(tuple(each.shape))) for name, each in model.named_parameters()]
    told: tuple[Any, ...] = (type(model).__name__, dtype, facts)
    coarse = sorted({dtype_name(each.weight.dtype) for each in model.modules() if isinstance(each, EightBitLayer)})
    digest = hashlib.sha256(repr((*told, coarse) if coarse else told).encode())
    return f"{type(model).__name__} {digest.hexdigest()[:12]}"


def described_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The shapes of a call in one text: `sample 2x4x64x64 float16, ...`."""
    return ", ".join(_described((*args, *(kwargs[name] for name in sorted(kwargs)))))


def _described(values: Any) -> Iterator[str]:
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, torch.Tensor):
            yield f"{'x'.join(map(str, value.shape)) or 1} {dtype_name(value.dtype)}"
        elif isinstance(value, (dict, list, tuple)):
            yield from _described(value)
