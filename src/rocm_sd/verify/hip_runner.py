"""Run an op's HIP implementation for an architecture that is not there.

    with emulated_hip("gfx1100") as run:
        y = op.implementation("hip").run(*arguments, config=config)     # torch tensors on the CPU
    run.require_written(y)

As `runner.emulated` does it for Triton: each kernel is compiled by clang and executed by the emulator.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING

from rocm_sd import arch as archs
from rocm_sd.kernels import hip as hip_kernels
from rocm_sd.kernels.hip import toolchain
from rocm_sd.verify.code_object import CodeObject
from rocm_sd.verify.runner import BUDGET, Run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rocm_sd.arch import Arch
    from rocm_sd.kernels.hip.launch import Argument, Kernel

__all__ = ["EmulatedLauncher", "emulated_hip"]


class EmulatedLauncher:
    """A `Launcher` that compiles for any architecture, and executes on the tensors' memory; `run` has the calls."""

    def __init__(self, arch: Arch | str, *, execute: bool = True, budget: int = BUDGET) -> None:
        self.arch = archs.get(arch) if isinstance(arch, str) else arch
        self.run = Run(self.arch, execute, budget=budget)

    def launch(self, kernel: Kernel, grid: tuple[int, int, int], arguments: Sequence[Argument]) -> None:
        compiled = toolchain.compile_source(kernel.source, self.arch, dict(kernel.parameters))
        self.run.launch_code(_code(compiled.elf, compiled.assembly, kernel.name), grid, arguments)


@lru_cache(maxsize=64)
def _code(elf: bytes, assembly: str, name: str) -> CodeObject:
    return CodeObject.from_elf(elf, assembly, name)


@contextmanager
def emulated_hip(arch: Arch | str, *, execute: bool = True, budget: int = BUDGET) -> Iterator[Run]:
    """For the duration, HIP kernels run for `arch`. With `execute=False` they are compiled and recorded only."""
    launcher = EmulatedLauncher(arch, execute=execute, budget=budget)
    with hip_kernels.launched_by(launcher), launcher.run.recorded():
        yield launcher.run
