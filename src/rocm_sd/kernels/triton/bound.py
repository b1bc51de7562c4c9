"""A launch that is bound once: variant, grid and numbers are kept, and a repeated launch puts in pointers only.

    norm = Bound(_norm, (rows,), (M, C), {"ROWS": 4, "num_warps": 4})
    norm(x, y)                               # kernel[grid](x, y, M, C, ROWS=4, num_warps=4)

Triton looks at every argument in every launch, to find the variant that was compiled for it: 20 to 40 us of the host's
time, where the driver itself takes 3. A `Bound` is used for tensors of one dtype, one layout and one device; what
else decides a variant, the alignment of pointers, is looked at in each call. Where anything is unusual, Triton
launches: the interpreter, a pointer that is not a multiple of 16, a hook, a variant that is not compiled yet, another
Triton than those whose launchers are known.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

try:
    from triton import knobs
except ImportError:  # before Triton 3.4
    knobs = None

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType

__all__ = ["Bound", "Part", "Piece", "binds"]

Part = torch.Tensor | None  # of a launch that may do without it: a bias, a residual
# Where a piece of a tensor's memory begins, and how many elements it has; None: the tensor as it is.
Piece = tuple[int, int] | None

# What Triton's own launch does last, from 3.4 to 3.9 at least, for NVIDIA and AMD alike. Triton 3.2 hands over other
# arguments, and 3.3 has its hooks elsewhere.
_LAUNCH = (
    "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata, "
    "knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *bound_args.values())"
)
_ALIGNED = 15


@cache
def _is_known() -> bool:
    """Whether launchers of this Triton take what `_LAUNCH` says: asked of its source, which a version cannot hide."""
    try:
        source = inspect.getsource(JITFunction.run)
    except (OSError, TypeError):
        return False
    return knobs is not None and _LAUNCH in " ".join(source.split())


def binds(module: ModuleType) -> bool:
    """Whether launches of a module's kernels are cheaper bound: not those that are interpreted, or have stand-ins."""
    return _is_known() and any(isinstance(each, JITFunction) for each in vars(module).values())


class Bound:
    """A launch of `kernel`, whose arguments are pointers, then `numbers`, then `constants` and options by name.

    `pieces` says of each pointer which piece of its tensor it means; () means the whole of each. Threads may share it.
    """

    __slots__ = ("_constants", "_grid", "_kernel", "_numbers", "_pieces", "_ready")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        numbers: Sequence[float],
        constants: Mapping[str, Any],
        pieces: tuple[Piece, ...] = (),
    ) -> None:
        self._kernel, self._grid, self._constants, self._pieces = kernel, grid, constants, pieces
        self._numbers = tuple(numbers)
        # Set at once, so that no thread sees a half of it.
        self._ready: _Ready | None = None

    def __call__(self, *tensors: Part) -> None:
        """In order with what ran before on torch's current stream of the tensors' device."""
        ready = self._ready
        if ready is None or ready.device != ready.current_device() or _is_watched(self._kernel):
            self._by_triton(tensors)
            return
        low = 0
        pointers: list[int | None] = []
        for tensor in tensors:
            if tensor is None:
                pointers.append(None)
            else:
                pointer = tensor.data_ptr()
                low |= pointer
                pointers.append(pointer)
        for place, offset in ready.offsets:
            inner = (pointers[place] or 0) + offset
            low |= inner
            pointers[place] = inner
        if low & _ALIGNED:
            self._by_triton(tensors)
            return
        stream = ready.stream(ready.device)
        ready.run(*ready.grid, stream, ready.function, ready.metadata, None, None, None, *pointers, *ready.rest)

    def _by_triton(self, tensors: tuple[Part, ...]) -> None:
        device = next((t.device for t in tensors if t is not None and t.is_cuda), None)
        if device is not None and device.index != torch.cuda.current_device():
            # Triton launches on the current device, whichever the tensors are on.
            with torch.cuda.device(device):
                self._launch(tensors)
        else:
            self._launch(tensors)

    def _launch(self, tensors: tuple[Part, ...]) -> None:
        given = [
            tensor if piece is None or tensor is None else _piece(tensor, piece)
            for tensor, piece in zip(tensors, self._pieces or (None,) * len(tensors), strict=True)
        ]
        compiled = self._kernel[self._grid](*given, *self._numbers, **self._constants)
        if self._ready is None and isinstance(compiled, CompiledKernel) and _is_known():
            if any(tensor is not None and tensor.data_ptr() & _ALIGNED for tensor in given):
                # This variant is for tensors that lie like these; the aligned ones are bound.
                return
            self._ready = _Ready(self, compiled, given)

    def _rest(self) -> tuple[Any, ...]:
        """What follows the pointers in the order of the kernel's parameters."""
        constants = [self._constants[name] for name in self._kernel.arg_names if name in self._constants]
        return *self._numbers, *constants


class _Ready:
    """What a launch needs beside pointers and a stream, for one device."""

    __slots__ = ("current_device", "device", "function", "grid", "metadata", "offsets", "rest", "run", "stream")

    def __init__(self, bound: Bound, compiled: CompiledKernel, given: list[Part]) -> None:
        active = driver.active
        self.current_device, self.stream = active.get_current_device, active.get_current_stream
        self.device = active.get_current_device()
        self.run, self.function, self.metadata = compiled.run, compiled.function, compiled.packed_metadata
        self.grid = (*bound._grid, 1, 1)[:3]  # noqa: SLF001 -- of this module
        self.rest = bound._rest()  # noqa: SLF001
        self.offsets = tuple(
            (place, piece[0] * tensor.element_size())
            for place, (piece, tensor) in enumerate(zip(bound._pieces, given, strict=False))  # noqa: SLF001
            if piece is not None and piece[0] and tensor is not None
        )


def _piece(tensor: torch.Tensor, piece: tuple[int, int]) -> torch.Tensor:
    first, count = piece
    return tensor.as_strided((count,), (1,), tensor.storage_offset() + first)


def _is_watched(kernel: Any) -> bool:
    """Whether somebody wants to hear of launches."""
    runtime = knobs.runtime
    entered, left = runtime.launch_enter_hook, runtime.launch_exit_hook
    # Up to Triton 3.4 it is a function or None, then a chain of functions.
    if entered is not None and getattr(entered, "calls", True):
        return True
    return (left is not None and bool(getattr(left, "calls", True))) or bool(kernel.pre_run_hooks)
