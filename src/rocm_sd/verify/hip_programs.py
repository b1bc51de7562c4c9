"""What one workgroup of a HIP launch does: bytes it moves, matrices it multiplies. Counted in the emulator.

    with counted_hip("gfx1030") as launches:
        op.implementation("hip").run(*arguments, config=config)

The first workgroup of each grid is executed at the real size, on memory that is read and never written back, and the
rest is taken to be like it, as in `programs`. What the emulator does not execute is counted on the architecture that
is nearest: tiles, grids and bytes are those of the launch, which is made for the architecture asked for.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd import arch as archs
from rocm_sd.kernels import hip as hip_kernels
from rocm_sd.kernels.hip import toolchain
from rocm_sd.tuning.ranking import Program
from rocm_sd.verify.code_object import CodeObject
from rocm_sd.verify.programs import CountedLaunch
from rocm_sd.verify.runner import BUDGET, memory_of
from rocm_sd.verify.stand_ins import facts_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rocm_sd.arch import Arch
    from rocm_sd.kernels.hip.launch import Argument, Kernel
    from rocm_sd.verify.emulator import Counters

__all__ = ["CountedHipLaunch", "KnownHip", "counted_hip", "stand_in"]

# One of each family that the emulator executes.
_EXECUTED = ("gfx1100", "gfx1201", "gfx942")


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
    executed = [archs.get(name) for name in _EXECUTED]
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
            compiled = toolchain.compile_source(kernel.source, self._executed, dict(kernel.parameters))
            code = CodeObject.from_elf(compiled.elf, compiled.assembly, kernel.name)
            counters = _first_workgroup(code, grid, arguments)
            tensors = {t.data_ptr(): t.numel() * t.element_size() for t in arguments if isinstance(t, torch.Tensor)}
            program = Program(
                counters.bytes_loaded, counters.bytes_stored, (), sum(tensors.values()), counters.matrix_flops
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
    return launch(code, grid, values, budget=BUDGET, first=1)


def _described(value: Argument) -> Any:
    return (str(value.dtype), tuple(value.shape), value.stride()) if isinstance(value, torch.Tensor) else value


@contextmanager
def counted_hip(arch: Arch | str, known: KnownHip | None = None) -> Iterator[list[CountedHipLaunch]]:
    """For the duration HIP launches are counted, and `arch.device_facts` tells of the named product."""
    gpu = archs.get(arch) if isinstance(arch, str) else arch
    launcher = _CountingLauncher(gpu, {} if known is None else known)
    with hip_kernels.launched_by(launcher), facts_of(gpu):
        yield launcher.launches
