"""The GEMM libraries of a GPU build of torch: the switch between them, and why one cannot be switched to here.

The switch is global to the process: it is set around one call and put back.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import torch

from rocm_sd.arch.torch_libraries import GEMM_LIBRARIES, GemmLibrary, build_of_torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["GEMM_LIBRARIES", "GemmLibrary", "preferred", "why_not"]


@contextmanager
def preferred(library: GemmLibrary) -> Iterator[None]:
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(library.switch)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


@cache
def _refusal(library: GemmLibrary) -> str | None:
    """torch refuses a library that it was built without, and quietly takes another where the card has none."""
    with warnings.catch_warnings():
        # "An experimental feature", once for each process: said here, it is not said in the middle of a picture.
        warnings.simplefilter("ignore")
        try:
            with preferred(library):
                taken = torch.backends.cuda.preferred_blas_library()
        except RuntimeError as error:
            return f"torch's refusal of {library.name}: {str(error).splitlines()[0].rstrip('.')}"
    name = str(taken).rpartition(".")[2].lower()
    if name != library.switch:
        return f"{library.name} on this card: torch takes {name} instead"
    return None


def why_not(library: GemmLibrary, device: torch.device) -> str | None:
    build = build_of_torch()
    if build != library.build:
        return f"{library.name}, a library of {library.build}, in a {build or 'CPU'} build of torch"
    if device.type != "cuda":
        return f"a tensor on {device.type}: {library.name} runs on a GPU"
    return _refusal(library)
