"""What one workgroup of a launch does: bytes it moves, matrices it multiplies.

    with counted("rocm_sd.kernels.triton.group_norm_silu", "gfx1100") as launches:
        op.implementation("triton").run(*arguments, config=config)
    with counted_hip("gfx1030") as launches:
        op.implementation("hip").run(*arguments, config=config)

Triton's kernels are counted in its interpreter: only the first program of each grid runs, loads give zeros and products
are not computed, so a launch of any size takes milliseconds. The rest of the grid is taken to be like it: edge tiles,
which do as much work for less result, count as whole ones. The process must run with TRITON_INTERPRET=1.

HIP kernels are counted in the emulator: the first workgroup of each grid is executed at the real size, on memory that
is read and never written back. What the emulator does not execute is counted on the architecture that is nearest:
tiles, grids and bytes are those of the launch, which is made for the architecture asked for.
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
from rocm_sd.kernels import hip as hip_kernels
from rocm_sd.tuning.ranking import Program
from rocm_sd.verify.proofs import EMULATED
from rocm_sd.verify.runner import BUDGET, ModuleKernels, facts_of, hip_code, memory_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import ModuleType

    from rocm_sd.arch import Arch
    from rocm_sd.kernels.hip.launch import Argument, Kernel
    from rocm_sd.verify.code_object import CodeObject
    from rocm_sd.verify.emulator import Counters

__all__ = ["CountedHipLaunch", "CountedLaunch", "Known", "KnownHip", "counted", "counted_hip", "stand_in"]


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
    dots = tuple((m, n, k, count) for (m, n, k), count in sorted(meter.dots.items()))
    program = Program(meter.loaded, meter.stored, dots, _memory((*positional, *named.values())))
    return CountedLaunch(kernel.fn.__name__, meter.grid, program)


def _memory(arguments: Sequence[Any]) -> int:
    """Bytes of the tensors among the arguments, each counted once."""
    tensors = (value for value in arguments if isinstance(value, torch.Tensor))
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()}"
    return f"{value[0]}={_described(value[1])}" if isinstance(value, tuple) and len(value) == 2 else repr(value)


@contextmanager
def counted(module: str | ModuleType, arch: Arch | str, known: Known | None = None) -> Iterator[list[CountedLaunch]]:
    """For the duration the module's launches are counted, and `arch.device_facts` is that of its product.

    `known` keeps what was counted from one block to the next: two architectures often get the same launch.
    """
    interpreter = optional_module("triton.runtime.interpreter", "triton", "verify")
    kernels = ModuleKernels(module, interpreter.InterpretedFunction)
    if not kernels.kernels:
        name = module if isinstance(module, str) else module.__name__
        raise Unsupported("Counting", f"{name} where its kernels are not interpreted", hint="Set TRITON_INTERPRET=1.")
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


@dataclass(frozen=True)
class CountedHipLaunch(CountedLaunch):
    """`coalescing`: bytes asked for over those of the cache lines that they lie in, 1 where lanes share what they ask
    for; `conflicts` of LDS banks.
    """

    coalescing: float
    conflicts: int


KnownHip = dict[tuple[Any, ...], CountedHipLaunch]


def stand_in(arch: Arch) -> Arch:
    """The architecture itself, or the nearest that is executed: of the same matrix unit, else of the same waves."""
    executed = [archs.get(name) for name in EMULATED]
    return min(
        executed, key=lambda a: (a.name != arch.name, a.wave_size != arch.wave_size, a.matrix_unit != arch.matrix_unit)
    )


class _CountingLauncher:
    """A `Launcher` that counts instead of computing. `known` keeps what was counted from one block to the next."""

    def __init__(self, arch: Arch, known: KnownHip) -> None:
        self.arch = arch
        self.launches: list[CountedHipLaunch] = []
        self._executed = stand_in(arch)
        self._known = known

    def launch(self, kernel: Kernel, grid: tuple[int, int, int], arguments: Sequence[Argument]) -> None:
        same = (self._executed.name, kernel, grid, *map(_described, arguments))
        if same not in self._known:
            counters = _first_workgroup(hip_code(kernel, self._executed), grid, arguments)
            program = Program(
                counters.bytes_loaded, counters.bytes_stored, (), _memory(arguments), counters.matrix_flops
            )
            self._known[same] = CountedHipLaunch(
                kernel.name,
                grid,
                program,
                round(min(1.0, counters.coalescing_efficiency), 4),
                counters.lds_bank_conflicts,
            )
        self.launches.append(self._known[same])


def _first_workgroup(code: CodeObject, grid: tuple[int, int, int], arguments: Sequence[Argument]) -> Counters:
    from rocm_sd.verify.emulator import Buffer, launch  # noqa: PLC0415 -- needs tinygrad

    buffers = {t.data_ptr(): Buffer(memory_of(t)) for t in arguments if isinstance(t, torch.Tensor)}
    values = [buffers[value.data_ptr()] if isinstance(value, torch.Tensor) else value for value in arguments]
    return launch(code, grid, values, budget=BUDGET, only=range(1))


@contextmanager
def counted_hip(arch: Arch | str, known: KnownHip | None = None) -> Iterator[list[CountedHipLaunch]]:
    """For the duration HIP launches are counted, and `arch.device_facts` is that of its product."""
    gpu = archs.get(arch) if isinstance(arch, str) else arch
    launcher = _CountingLauncher(gpu, {} if known is None else known)
    with hip_kernels.launched_by(launcher), facts_of(gpu):
        yield launcher.launches
