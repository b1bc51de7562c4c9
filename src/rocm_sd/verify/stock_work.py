"""What stock torch computes beside this project's kernels, and how long a card would take for it at least: a model.

with StockWork(arch) as stock:
    unet(...)
print(stock.calls, stock.modelled_us)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from rocm_sd import arch as archs
from rocm_sd.tuning.ranking import LAUNCH_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.arch import Arch

__all__ = ["StockWork"]

_ALLOCATE = ("aten::empty", "aten::new_empty", "aten::lift_fresh", "aten::_local_scalar_dense")


class StockWork(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """with StockWork(arch) as stock: unet(...); stock.calls, stock.modelled_us.

    Counts calls of torch's own ops within, and their rooflines on `arch`: operations at its peak, or bytes of inputs
    and results at its bandwidth, whichever takes longer, and a launch for each.
    """

    def __init__(self, arch: Arch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arch = arch
        self.calls = 0
        self.modelled_us = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _launches(func, args, result):
            self.calls += 1
            self.modelled_us += self._us(func, args, kwargs or {}, result)
        return result

    def _us(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> float:
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
        moved = sum(t.numel() * t.element_size() for t in tensors)
        count = flop_registry.get(func.overloadpacket)
        flops = count(*args, **kwargs, out_val=result) if count is not None else 0
        return (LAUNCH_S + archs.roofline(self._arch, flops, moved, "float16").seconds) * 1e6


def _launches(func: Any, args: tuple[Any, ...], result: Any) -> bool:
    """Whether the call computes: a view of what is there, or memory alone, is none."""
    schema = func._schema  # noqa: SLF001 -- torch has no public one
    if schema.name.startswith(_ALLOCATE):
        return False
    given = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if isinstance(t, torch.Tensor)}
    made = {t.untyped_storage().data_ptr() for t in tree_leaves(result) if isinstance(t, torch.Tensor)}
    return bool(schema.is_mutable) or not made <= given
