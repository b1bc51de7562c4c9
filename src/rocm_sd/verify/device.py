"""A card that is not there: the engine runs as on it, and every kernel of this project as that card's machine code.

    with emulated("gfx1100") as card:
        rocm_sd.optimize(pipe)
        picture = pipe("a red frog").images[0]
    print(card.total().wave_instructions)

Tensors stay on the CPU, and what stock torch computes, it computes there. `arch.detect` answers the card, ops choose
from the data that it ships with, and nothing that was measured here counts. A launch is compiled for the card with the
specialisation of its runtime, refused where the card would refuse it, and executed by the emulator on the tensors' own
memory: an access outside of it, a missing wait or a race is an error. Memory is poisoned before a kernel writes it.

`ROCM_SD_EMULATE=gfx1100` does the same for a whole process, from the first `optimize` on.
"""

from __future__ import annotations

import importlib.util
import math
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd import arch as archs
from rocm_sd import settings
from rocm_sd.errors import RocmSdError, Unsupported, optional_module
from rocm_sd.kernels import hip as hip_kernels
from rocm_sd.kernels.hip import toolchain
from rocm_sd.ops import OPS
from rocm_sd.ops.registry import forget_choices, preferring
from rocm_sd.tuning.ranking import seconds_at_least
from rocm_sd.verify.compiler import compile_for
from rocm_sd.verify.proofs import EMULATED
from rocm_sd.verify.runner import BUDGET, ModuleKernels, Run, grid_of, hip_code, scaled, specialise, total

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rocm_sd.arch import Arch
    from rocm_sd.kernels.hip.launch import Argument, Kernel
    from rocm_sd.verify.code_object import CodeObject
    from rocm_sd.verify.compiler import KernelConfig
    from rocm_sd.verify.emulator import Counters

__all__ = ["EmulatedCard", "Launch", "LaunchRefused", "emulated", "start_if_asked"]

# What HIP takes of a grid (hipDeviceProp_t::maxGridSize of every AMD card): x, y and z.
_LARGEST_GRID = (2**31 - 1, 2**16, 2**16)


class LaunchRefused(RocmSdError):
    """The card's runtime would not launch it."""


@dataclass(frozen=True)
class Launch:
    """One launch of one kernel of an op; `tensors`: bytes of what it was given; `seconds` are the emulator's."""

    op: str
    kernel: str
    grid: tuple[int, int, int]
    config: KernelConfig | None
    code: CodeObject
    counters: Counters
    tensors: int
    seconds: float

    @property
    def modelled_us(self) -> float | None:
        """On the card, at least: a MODEL of the counted work (`ranking.seconds_at_least`), never a measurement."""
        moved = min(self.tensors, self.counters.bytes_loaded + self.counters.bytes_stored)
        cycles = self.counters.modelled_cycles()
        seconds = seconds_at_least(self.counters.arch, self.counters.workgroups, cycles, moved)
        return None if seconds is None else seconds * 1e6

    @property
    def variant(self) -> tuple[str, str]:
        """Launches of one variant run the same machine code."""
        return self.kernel, repr(self.config) if self.config is not None else self.code.name


@dataclass(eq=False)
class EmulatedCard:
    """What was launched on it, in order. `on_launch` hears of each; `edit` changes machine code after it is compiled,
    which is how it is shown that faults are noticed. `one_only`: of each grid one workgroup is executed, in its
    middle and once for launches that are alike, and counts for all of them: results are garbage, and a launch of any
    size is counted.
    """

    arch: Arch
    on_launch: Callable[[Launch], object] | None = None
    edit: Callable[[CodeObject], CodeObject] | None = None
    one_only: bool = False
    launches: list[Launch] = field(default_factory=list)
    _codes: dict[Any, CodeObject] = field(default_factory=dict)
    _counted: dict[Any, Counters] = field(default_factory=dict)
    _kernels: list[ModuleKernels] = field(default_factory=list)

    def total(self) -> Counters:
        """Over all launches."""
        return total(launch.counters for launch in self.launches)

    def launch_triton(self, kernel: Any, grid: Any, positional: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        config, arguments = specialise(kernel, positional, named)
        known_as = kernel.fn.__module__, kernel.fn.__qualname__, config
        if known_as not in self._codes:
            with ExitStack() as stack:
                for module in self._kernels:
                    stack.enter_context(module.as_they_were())
                self._codes[known_as] = self._edited(compile_for(self.arch, kernel, config))
        size = grid_of(grid, dict(config.constants) | {each.name: each.value for each in arguments})
        self._launch(kernel.fn.__module__.rpartition(".")[2], self._codes[known_as], size, config, arguments)

    def launch(self, kernel: Kernel, grid: tuple[int, int, int], arguments: Sequence[Argument]) -> None:
        """As a `Launcher` of HIP kernels."""
        if kernel not in self._codes:
            self._codes[kernel] = self._edited(hip_code(kernel, self.arch))
        self._launch(Path(kernel.source).stem, self._codes[kernel], grid, None, Run.named(arguments))

    def _edited(self, code: CodeObject) -> CodeObject:
        return self.edit(code) if self.edit else code

    def _launch(
        self, op: str, code: CodeObject, grid: tuple[int, int, int], config: KernelConfig | None, arguments: list[Any]
    ) -> None:
        reason = _why_refused(self.arch, code, grid)
        if reason is not None:
            raise LaunchRefused(f"{self.arch.name} does not launch {code.name}: {reason}.")
        began = time.perf_counter()
        counters = self._executed(code, grid, arguments)
        launch = Launch(op, code.name, grid, config, code, counters, _bytes(arguments), time.perf_counter() - began)
        self.launches.append(launch)
        if self.on_launch is not None:
            self.on_launch(launch)

    def _executed(self, code: CodeObject, grid: tuple[int, int, int], arguments: list[Any]) -> Counters:
        run = Run(self.arch, execute=True, budget=BUDGET)
        if not self.one_only:
            return run.executed(code, grid, arguments)
        # Code objects are kept: none has the identity of another. Numbers say how often a loop is gone through.
        known_as = id(code), grid, *(each.value for each in arguments if not isinstance(each.value, torch.Tensor))
        if known_as not in self._counted:
            x, y, z = grid
            # Not at an edge, where a tile may have less to do.
            middle = x // 2 + x * (y // 2 + y * (z // 2))
            one = run.executed(code, grid, arguments, only=range(middle, middle + 1))
            self._counted[known_as] = scaled(one, math.prod(grid))
        return self._counted[known_as]


def _bytes(arguments: Sequence[Any]) -> int:
    """Of the tensors among them, each counted once."""
    tensors = (each.value for each in arguments if isinstance(each.value, torch.Tensor))
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


def _why_refused(arch: Arch, code: CodeObject, grid: tuple[int, int, int]) -> str | None:
    waves = -(-code.workgroup_size // code.wave_size)
    fits = archs.occupancy(
        arch, code.vgprs, code.lds, max(waves, 1), wave_size=code.wave_size, sgprs=None, agprs=code.agprs
    )
    if not fits.workgroups:
        used = f"{code.lds} bytes of LDS, {code.vgprs} VGPRs, {code.workgroup_size} threads"
        return f"a workgroup does not fit ({used}; limited by {fits.limited_by})"
    if any(asked > most for asked, most in zip(grid, _LARGEST_GRID, strict=True)):
        return f"a grid of {grid} is larger than {_LARGEST_GRID}"
    return None


@contextmanager
def emulated(
    arch: Arch | str,
    *,
    prefer: str | None = None,
    on_launch: Callable[[Launch], object] | None = None,
    edit: Callable[[CodeObject], CodeObject] | None = None,
    one_only: bool = False,
) -> Iterator[EmulatedCard]:
    """For the duration, in all threads, CPU tensors are on that card.

    `on_launch`, `edit` and `one_only`: as of `EmulatedCard`. `prefer`: an implementation that ops choose wherever it
    can do the problem ("triton", "hip"), as on a card where it was measured to be the fastest; None leaves it to the
    shipped data.
    """
    known = archs.get(arch) if isinstance(arch, str) else arch
    if known.name not in EMULATED:
        raise Unsupported("The emulator", known.name, hint=f"It executes: {', '.join(EMULATED)}.")
    optional_module("tinygrad", "tinygrad", "verify")
    interface = optional_module("triton.runtime.jit", "triton", "verify").KernelInterface
    card = EmulatedCard(known, on_launch, edit, one_only)
    card._kernels += [ModuleKernels(f"rocm_sd.kernels.triton.{op}", interface) for op in _ops_in_triton()]  # noqa: SLF001
    with ExitStack() as stack:
        for module in card._kernels:  # noqa: SLF001
            stack.enter_context(module.launched_by(card.launch_triton))
        if _has_clang():
            stack.enter_context(hip_kernels.launched_by(card))
        stack.enter_context(archs.emulating(known))
        if not one_only:
            stack.enter_context(_poisoned())
        stack.callback(forget_choices)
        if prefer is not None:
            stack.enter_context(preferring(prefer))
        forget_choices()
        yield card


def _has_clang() -> bool:
    try:
        toolchain.find_compiler()
    except RocmSdError:
        return False
    return True


def _ops_in_triton() -> list[str]:
    return [op for op in OPS if importlib.util.find_spec(f"rocm_sd.kernels.triton.{op}") is not None]


@contextmanager
def _poisoned() -> Iterator[None]:
    """Within, memory that torch.empty hands out holds NaN: what no kernel writes, and what is read too early, shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    poison: Any = torch.utils.deterministic
    filled = poison.fill_uninitialized_memory
    poison.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        poison.fill_uninitialized_memory = filled


_of_process = ExitStack()


def start_if_asked() -> None:
    """Emulate the card that ROCM_SD_EMULATE names, from now to the end of the process."""
    name = settings.current().emulate
    if name is not None and archs.emulated() is None:
        _of_process.enter_context(emulated(name))
