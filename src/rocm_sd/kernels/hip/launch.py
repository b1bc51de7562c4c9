"""Between an op's launcher and what runs its kernels: a card's runtime, or the emulator of the proof ladder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Union

from rocm_sd.errors import Unsupported
from rocm_sd.kernels.sizes import ceil_div
from rocm_sd.kernels.unavailable import KernelUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    import torch

    from rocm_sd.arch import Arch

__all__ = [
    "BITS",
    "ELEMENTS",
    "Argument",
    "HipRefused",
    "HipUnavailable",
    "Kernel",
    "Launcher",
    "access_width",
    "bits_of",
    "ceil_div",
    "element_of",
    "has",
    "parameters_of",
]

# A tensor or None is a pointer, an int 32 bits, a float a float32.
Argument = Union["torch.Tensor", int, float, None]

# By the name after "torch.": the C++ types of types.hpp.
ELEMENTS = {"float16": "half", "bfloat16": "bfloat", "float32": "float"}
BITS = {2: "bits16", 4: "bits32"}
_WIDEST = 16  # bytes that one lane moves at once


class HipUnavailable(KernelUnavailable):
    """Of a kernel in HIP."""


class HipRefused(Unsupported, HipUnavailable):
    """A launcher cannot take these very tensors, by their strides or sizes: others of the same problem it may take."""

    lasting = False


@dataclass(frozen=True)
class Kernel:
    """The entry point `name` of `sources/<source>.hip`, or of a file of yours, compiled with `parameters`."""

    source: str | Path
    name: str
    parameters: tuple[tuple[str, int | str], ...] = ()


class Launcher(Protocol):
    """Runs kernels for one architecture. The size of a workgroup is part of the kernel."""

    @property
    def arch(self) -> Arch: ...

    def launch(self, kernel: Kernel, grid: tuple[int, int, int], arguments: Sequence[Argument]) -> None:
        """Run `grid` workgroups, in order with what ran before."""
        ...


def element_of(tensor: torch.Tensor) -> str:
    return ELEMENTS[str(tensor.dtype).removeprefix("torch.")]


def parameters_of(
    like: torch.Tensor, parameters: Iterable[tuple[str, int | str]] = (), **more: int
) -> tuple[tuple[str, int | str], ...]:
    """What a kernel is compiled with: the element of `like`, then names and numbers."""
    return ("element", element_of(like)), *parameters, *((name, int(value)) for name, value in more.items())


def has(**parts: torch.Tensor | None) -> tuple[tuple[str, int], ...]:
    """("has_bias", 1) for a `bias` that is there, ("has_bias", 0) for None: a kernel is compiled with it or without."""
    return tuple((f"has_{name}", int(part is not None)) for name, part in parts.items())


def bits_of(tensor: torch.Tensor) -> str:
    """The type for kernels that move values and never look at them."""
    return BITS[tensor.element_size()]


def access_width(size: int, *strides: int, tensors: Sequence[torch.Tensor | None] = ()) -> int:
    """Elements of `size` bytes that one access may take: 16 bytes, or less where rows or tensors begin in between."""
    width = _WIDEST // size
    while width > 1 and (
        any(stride % width for stride in strides)
        or any(tensor is not None and tensor.data_ptr() % (width * tensor.element_size()) for tensor in tensors)
    ):
        width //= 2
    return width
