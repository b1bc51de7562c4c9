"""What one workgroup of a launch does: bytes it moves, matrices it multiplies. Counted in Triton's interpreter.

    with counted("rocm_sd.kernels.triton.group_norm_silu", "gfx1100") as launches:
        op.implementation("triton").run(*arguments, config=config)

Only the first program of each grid runs, loads give zeros and products are not computed, so a launch of any size takes
milliseconds. The rest of the grid is taken to be like it: edge tiles, which do as much work for less result, count as
whole ones. The process must run with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rocm_sd import arch as archs
from rocm_sd.errors import Unsupported, optional_module
from rocm_sd.tuning.ranking import Program
from rocm_sd.verify.stand_ins import ModuleKernels, facts_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rocm_sd.arch import Arch

__all__ = ["CountedLaunch", "Known", "counted"]


class _FirstProgramDone(BaseException):
    """Ends a launch. Not an Exception: the interpreter turns those into an error of its own."""


@dataclass(frozen=True)
class CountedLaunch:
    kernel: str
    grid: tuple[int, int, int]
    program: Program


Known = dict[tuple[str, ...], CountedLaunch]


class _Meter:
    """Stands before the methods of the interpreter's builder for the duration of one launch."""

    def __init__(self) -> None:
        self.grid = (1, 1, 1)
        self.loaded = self.stored = 0
        self.dots: Counter[tuple[int, int, int]] = Counter()
        self._started = False

    def set_grid_dim(self, original: Any, x: int, y: int, z: int) -> None:
        self.grid = (int(x), int(y), int(z))
        original(x, y, z)

    def set_grid_idx(self, original: Any, x: int, y: int, z: int) -> None:
        if self._started:
            raise _FirstProgramDone
        self._started = True
        original(x, y, z)

    def create_masked_load(self, original: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        self.loaded += _bytes(pointers, mask)
        # Masked out altogether: no memory is touched, and the value still has the type that the kernel expects.
        return original(pointers, type(mask)(np.zeros_like(mask.data), mask.dtype), other, *rest)

    def create_masked_store(self, _original: Any, pointers: Any, _value: Any, mask: Any, *_rest: Any) -> None:
        self.stored += _bytes(pointers, mask)

    def create_dot(self, _original: Any, a: Any, b: Any, d: Any, *_rest: Any) -> Any:
        batch = int(np.prod(a.data.shape[:-2], dtype=np.int64))
        self.dots[a.data.shape[-2], b.data.shape[-1], a.data.shape[-1]] += batch
        return d


_METERED = ("set_grid_dim", "set_grid_idx", "create_masked_load", "create_masked_store", "create_dot")


def _bytes(pointers: Any, mask: Any) -> int:
    width: int = max(8, pointers.get_element_ty().primitive_bitwidth) // 8
    return int(np.broadcast_to(mask.data, pointers.data.shape).sum()) * width


def _count(kernel: Any, grid: Any, positional: tuple[Any, ...], named: Mapping[str, Any]) -> CountedLaunch:
    from triton.runtime.interpreter import interpreter_builder  # noqa: PLC0415 -- optional

    meter = _Meter()
    for name in _METERED:
        # In the instance, so that the class keeps its own and leaving is a deletion.
        vars(interpreter_builder)[name] = partial(getattr(meter, name), getattr(interpreter_builder, name))
    try:
        with np.errstate(all="ignore"):
            kernel[grid](*positional, **named)
    except _FirstProgramDone:
        pass
    finally:
        for name in _METERED:
            del vars(interpreter_builder)[name]
    tensors = {t.data_ptr(): t.numel() * t.element_size() for t in (*positional, *named.values()) if _is_tensor(t)}
    dots = tuple((m, n, k, count) for (m, n, k), count in sorted(meter.dots.items()))
    program = Program(meter.loaded, meter.stored, dots, sum(tensors.values()))
    return CountedLaunch(kernel.fn.__name__, meter.grid, program)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()}"
    return f"{value[0]}={_described(value[1])}" if isinstance(value, tuple) and len(value) == 2 else repr(value)


@contextmanager
def counted(module: str, arch: Arch | str, known: Known | None = None) -> Iterator[list[CountedLaunch]]:
    """For the duration the module's launches are counted, and `arch.device_facts` tells of the named product.

    `known` keeps what was counted from one block to the next: two architectures often get the same launch.
    """
    interpreter = optional_module("triton.runtime.interpreter", "triton", "verify")
    kernels = ModuleKernels(module, interpreter.InterpretedFunction)
    if not kernels.kernels:
        raise Unsupported("Counting", f"{module} where its kernels are not interpreted", hint="Set TRITON_INTERPRET=1.")
    launches: list[CountedLaunch] = []
    remembered: Known = {} if known is None else known

    def count(kernel: Any, grid: Any, positional: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        same = (kernel.fn.__name__, repr(grid), *map(_described, (*positional, *sorted(named.items()))))
        if same not in remembered:
            with kernels.as_they_were():
                remembered[same] = _count(kernel, grid, positional, named)
        launches.append(remembered[same])

    with kernels.launched_by(count), facts_of(archs.get(arch) if isinstance(arch, str) else arch):
        yield launches
