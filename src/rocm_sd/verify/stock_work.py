"""What stock torch computes beside this project's kernels, and how long a card would take for it at least: a model."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from rocm_sd import arch as archs
from rocm_sd.tuning.ranking import LAUNCH_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.arch import Arch

__all__ = ["ATTENTION", "StockCall", "StockWork"]

ATTENTION = "_scaled_dot_product"
_ALLOCATE = ("aten::empty", "aten::new_empty", "aten::lift_fresh", "aten::_local_scalar_dense")
# Larger results than this are not computed where nobody looks at them.
_SMALL = 1 << 14


class StockCall(NamedTuple):
    """`bytes` of inputs and results."""

    name: str
    flops: int
    bytes: int


class StockWork(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """with StockWork(arch) as stock: unet(...); stock.calls, stock.modelled_us.

    Counts calls of torch's own ops within, and their rooflines on `arch`: operations at its peak, or bytes of inputs
    and results at its bandwidth, whichever takes longer, and a launch for each. Without `compute` large results are
    zeros, and so is memory that is handed out unfilled: for counting alone. Of what lies there by chance, waves that
    compute the same value may get different NaNs, which looks like a race.
    """

    def __init__(self, arch: Arch, *, compute: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arch, self._compute = arch, compute
        self.by_call: Counter[StockCall] = Counter()

    @property
    def calls(self) -> int:
        return self.by_call.total()

    @property
    def modelled_us(self) -> float:
        return sum(count * self._us(call) for call, count in self.by_call.items())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        result = func(*args, **named) if self._compute else _zeros(func, args, named)
        if _launches(func, args, result):
            self.by_call[_call(func, args, named, result)] += 1
        return result

    def _us(self, call: StockCall) -> float:
        return (LAUNCH_S + archs.roofline(self._arch, call.flops, call.bytes, "float16").seconds) * 1e6


def _call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> StockCall:
    tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
    moved = sum(t.numel() * t.element_size() for t in tensors)
    name = str(func.overloadpacket).removeprefix("aten.")
    if name.startswith(ATTENTION):
        # Of a CPU's own kernel torch's registry has none: two products of every query with every key.
        query, key = args[0], args[1]
        return StockCall(name, 4 * query.numel() * key.shape[-2], moved)
    count = flop_registry.get(func.overloadpacket)
    return StockCall(name, int(count(*args, **kwargs, out_val=result)) if count is not None else 0, moved)


def _launches(func: Any, args: tuple[Any, ...], result: Any) -> bool:
    """Whether the call computes: a view of what is there, or memory alone, is none."""
    schema = func._schema  # noqa: SLF001 -- torch has no public one
    if schema.name.startswith(_ALLOCATE):
        return False
    given = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if isinstance(t, torch.Tensor)}
    made = {t.untyped_storage().data_ptr() for t in tree_leaves(result) if isinstance(t, torch.Tensor)}
    return bool(schema.is_mutable) or not made <= given


def _zeros(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The call's result; where it is large and not a view, zeros of its shape."""
    if func._schema.name.startswith(("aten::empty", "aten::new_empty")):  # noqa: SLF001 -- torch has no public one
        return func(*args, **kwargs).zero_()
    if func.is_view or not any(t.numel() > _SMALL for t in tree_leaves(args) if isinstance(t, torch.Tensor)):
        return func(*args, **kwargs)
    if func._schema.is_mutable:  # noqa: SLF001 -- torch has no public one
        return args[0]
    made = func(*tree_map(_on_meta, args), **tree_map(_on_meta, dict(kwargs)))
    return tree_map(lambda value: _like(value, "cpu").zero_() if isinstance(value, torch.Tensor) else value, made)


def _on_meta(value: Any) -> Any:
    return torch.device("meta") if isinstance(value, torch.device) else _like(value, "meta")


def _like(value: Any, device: str) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
