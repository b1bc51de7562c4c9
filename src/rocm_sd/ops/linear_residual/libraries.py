"""The GEMM libraries of a GPU build of torch, by name. Which vendor has which is the table `LIBRARIES`, and only that.

torch has one switch for both vendors and calls it by CUDA's names: "cublas" is rocBLAS in a ROCm build, "cublaslt" is
hipBLASLt. The switch is global to the process: it is set around one call and put back.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LIBRARIES", "Library", "preferred", "why_not"]


@dataclass(frozen=True)
class Library:
    """`switch` is torch's word for it; `adds_bias` where its GEMM can add a bias on the way out."""

    name: str
    build: str
    switch: str
    adds_bias: bool


LIBRARIES = (
    Library("cublas", "CUDA", "cublas", adds_bias=False),
    Library("cublaslt", "CUDA", "cublaslt", adds_bias=True),
    Library("rocblas", "ROCm", "cublas", adds_bias=False),
    Library("hipblaslt", "ROCm", "cublaslt", adds_bias=True),
    Library("ck", "ROCm", "ck", adds_bias=False),
)


def _build() -> str | None:
    if torch.version.hip is not None:
        return "ROCm"
    return "CUDA" if torch.version.cuda is not None else None


@contextmanager
def preferred(library: Library) -> Iterator[None]:
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(library.switch)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


@cache
def _refusal(library: Library) -> str | None:
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


def why_not(library: Library, device: torch.device) -> str | None:
    build = _build()
    if build != library.build:
        return f"{library.name}, a library of {library.build}, in a {build or 'CPU'} build of torch"
    if device.type != "cuda":
        return f"a tensor on {device.type}: {library.name} runs on a GPU"
    return _refusal(library)
