"""Calls of ops as data: shapes, strides and dtypes, described while a picture is drawn and rebuilt with random values.

Views of one storage stay views of one storage, at the same distances, so a packed
projection is read as it is in the model.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.ops import OPS
from rocm_sd.ops.samples import dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rocm_sd.ops.registry import Op

__all__ = ["OpCall", "TensorSpec", "Traced", "argument_names", "describe", "make"]

# Elements: where a tensor begins within them decides how wide its loads can be.
_ALIGNED = 64


@dataclass(frozen=True)
class TensorSpec:
    """`storage` numbers the storages of one call; `offset` counts from the first element of it that the call uses.

    `std`: weights are drawn so that a product keeps the size of its inputs, as in a trained model.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    storage: int
    offset: int
    std: float = 1.0

    @property
    def extent(self) -> int:
        """Elements of the storage from its start to the last of this tensor."""
        if 0 in self.shape:
            return self.offset
        return self.offset + 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True)
class OpCall:
    """One call of an op: tensors as `TensorSpec`, all else as it is. Equal calls are equal values."""

    op: str
    problem: tuple[tuple[str, int | str], ...]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Traced:
    """A problem by the call that makes it most often, and roughly how often a picture makes it."""

    call: OpCall
    count: int


def describe(
    op: str, problem: Mapping[str, int | str], arguments: tuple[Any, ...], names: tuple[str, ...] = ()
) -> OpCall:
    """Reads no values, so it may run while a graph is captured. `names` are those of the arguments, in order."""
    storages: dict[tuple[int, torch.dtype], int] = {}
    lowest: dict[int, int] = {}
    numbers: list[int | None] = []
    for argument in arguments:
        number = None
        if isinstance(argument, torch.Tensor):
            # An empty tensor has no storage of its own: address 0 is shared by all of them.
            key = (argument.untyped_storage().data_ptr(), argument.dtype)
            number = storages.setdefault(key if key[0] else (-len(storages) - 1, argument.dtype), len(storages))
            offset = int(argument.storage_offset())
            lowest[number] = min(lowest.get(number, offset), offset)
        numbers.append(number)
    specs: list[Any] = []
    for place, (argument, number) in enumerate(zip(arguments, numbers, strict=True)):
        if number is None:
            specs.append(argument)
            continue
        begin = lowest[number] - lowest[number] % _ALIGNED
        name = names[place] if place < len(names) else ""
        specs.append(
            TensorSpec(
                tuple(argument.shape),
                tuple(argument.stride()),
                dtype_name(argument.dtype),
                number,
                argument.storage_offset() - begin,
                _std(name, tuple(argument.shape)),
            )
        )
    return OpCall(op, tuple(problem.items()), tuple(specs))


def _std(name: str, shape: tuple[int, ...]) -> float:
    if not name.endswith("weight") or len(shape) < 2:
        return 1.0
    return float(max(1, math.prod(shape[1:])) ** -0.5)


@lru_cache(maxsize=64)
def argument_names(run: Callable[..., Any]) -> tuple[str, ...]:
    """The names of an implementation's positional arguments: what is named a `weight` is drawn as one."""
    return tuple(name for name, given in inspect.signature(run).parameters.items() if given.kind != given.KEYWORD_ONLY)


def make(call: OpCall, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
    """The arguments anew: floats are random, integers 0, which every op takes as an index; on meta all are empty."""
    extents: dict[int, int] = {}
    specs = [argument for argument in call.arguments if isinstance(argument, TensorSpec)]
    for spec in specs:
        extents[spec.storage] = max(extents.get(spec.storage, 0), spec.extent)
    random = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
    filled: dict[int, torch.Tensor] = {}
    for spec in specs:
        if spec.storage not in filled:
            filled[spec.storage] = _filled(extents[spec.storage], spec, device, random)
    arguments = [
        filled[a.storage].as_strided(a.shape, a.strides, a.offset) if isinstance(a, TensorSpec) else a
        for a in call.arguments
    ]
    return _with_derived(OPS[call.op], arguments) if call.op in OPS else tuple(arguments)


def _with_derived(op: Op, arguments: list[Any]) -> tuple[Any, ...]:
    """What follows from other arguments is made anew: at random it would be wrong."""
    for name, derive in op.derived.items():
        place = argument_names(op.implementations[0].run).index(name)
        if len(arguments) > place and arguments[place] is not None:
            arguments[place] = derive(*arguments).to(arguments[place].dtype)
    return tuple(arguments)


def _filled(size: int, spec: TensorSpec, device: torch.device, random: torch.Generator | None) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    if random is None:
        return torch.empty(size, dtype=dtype, device=device)
    if not dtype.is_floating_point:
        return torch.zeros(size, dtype=dtype, device=device)
    return (torch.randn(size, generator=random, device=device) * spec.std).to(dtype)
