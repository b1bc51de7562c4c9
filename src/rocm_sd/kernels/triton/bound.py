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
from copy import copy
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

try:
    from triton import knobs
except ImportError:  # before Triton 3.4
    knobs = None

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
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

    __slots__ = ("_compiled", "_constants", "_grid", "_hooks", "_kernel", "_numbers", "_pieces", "_ready")

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
        self._hooks: list[Any] = getattr(kernel, "pre_run_hooks", [])
        # Triton unloads a variant that nobody has any more.
        self._compiled: CompiledKernel | None = None
        # Set at once, so that no thread sees a half of it.
        self._ready: _Ready | None = None

    def __call__(self, *tensors: Part) -> None:
        """In order with what ran before on torch's current stream of the tensors' device."""
        ready = self._ready
        if ready is None or self._hooks or _is_watched():
            self._by_triton(tensors)
            return
        call, head, middle, rest, offsets, device, current_device, current_stream = ready
        low = 0
        pointers: list[int | None] = []
        for tensor in tensors:
            if tensor is None:
                pointers.append(None)
            else:
                pointer = tensor.data_ptr()
                low |= pointer
                pointers.append(pointer)
        for place, offset in offsets:
            inner = (pointers[place] or 0) + offset
            low |= inner
            pointers[place] = inner
        if low & _ALIGNED or current_device() != device:
            self._by_triton(tensors)
            return
        call(*head, current_stream(device), *middle, *pointers, *rest)

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
        # The variant of tensors that are not aligned is not that of others.
        aligned = not any(tensor is not None and tensor.data_ptr() & _ALIGNED for tensor in given)
        if self._ready is None and aligned and isinstance(compiled, CompiledKernel) and _is_known():
            ready = self._made_ready(compiled, given)
            self._compiled, self._ready = compiled, ready

    def _made_ready(self, compiled: CompiledKernel, given: list[Part]) -> _Ready:
        # In the order of the kernel's parameters, as Triton hands them over.
        constants = (self._constants[name] for name in self._kernel.arg_names if name in self._constants)
        rest = (*self._numbers, *constants)
        grid = (*self._grid, 1, 1)[:3]
        # Neither metadata nor hooks: a launch that somebody wants to hear of is Triton's.
        middle = (compiled.function, compiled.packed_metadata, None, None, None)
        inner = _without_python(compiled.run, grid, middle, [None if t is None else object() for t in given], rest)
        offsets = tuple(
            (place, piece[0] * tensor.element_size())
            for place, (piece, tensor) in enumerate(zip(self._pieces, given, strict=False))
            if piece is not None and piece[0] and tensor is not None
        )
        active = driver.active
        device, stream = _quicker(active.get_current_device), active.get_current_stream
        call, head, middle = inner or (compiled.run, grid, middle)
        return _Ready(call, head, middle, rest, offsets, active.get_current_device(), device, stream)


class _Ready(NamedTuple):
    """A launch is call(*head, stream, *middle, *pointers, *rest), where the device is current."""

    call: Callable[..., Any]
    head: tuple[Any, ...]
    middle: tuple[Any, ...]
    rest: tuple[Any, ...]
    offsets: tuple[tuple[int, int], ...]
    device: int
    current_device: Callable[[], int]
    current_stream: Callable[[int], int]


def _without_python(
    launcher: Any, grid: tuple[int, ...], middle: tuple[Any, ...], pointers: list[object], rest: tuple[Any, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]] | None:
    """(call, head, middle) of what a launcher hands on to its part in C; None where that is more than handing on.

    A launcher allocates scratch where a kernel needs it, which none here does, and calls the part in C with the same
    arguments and some that never change: 1.5 us of Python. It is found out by having it call something else.
    """
    scratch = (getattr(launcher, f"{kind}_scratch_size", 0) for kind in ("global", "profile"))
    if not callable(getattr(launcher, "launch", None)) or any(scratch):
        return None
    stream, handed_on = object(), []
    try:
        asked = copy(launcher)
        asked.launch = lambda *arguments: handed_on.append(arguments)
        asked(*grid, stream, *middle, *pointers, *rest)
        (arguments,) = handed_on
        at = next(place for place, each in enumerate(arguments) if each is stream)
    except Exception:  # noqa: BLE001 -- one that looks at its arguments: it is called as it is
        return None
    last = (*pointers, *rest)
    behind = len(arguments) - len(last)
    if at >= behind or any(a is not b for a, b in zip(arguments[behind:], last, strict=True)):
        return None
    return launcher.launch, arguments[:at], arguments[at + 1 : behind]


def _quicker(current_device: Callable[[], int]) -> Callable[[], int]:
    """torch's own function in C, where Triton asks torch: the one in Python sees to it that CUDA is initialised."""
    found: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", current_device)  # noqa: SLF001
    return found if current_device is torch.cuda.current_device else current_device


def _piece(tensor: torch.Tensor, piece: tuple[int, int]) -> torch.Tensor:
    first, count = piece
    return tensor.as_strided((count,), (1,), tensor.storage_offset() + first)


def _is_watched() -> bool:
    """Whether somebody wants to hear of launches."""
    runtime = knobs.runtime
    entered, left = runtime.launch_enter_hook, runtime.launch_exit_hook
    # Up to Triton 3.4 it is a function or None, then a chain of functions.
    if entered is not None and getattr(entered, "calls", True):
        return True
    return left is not None and bool(getattr(left, "calls", True))
